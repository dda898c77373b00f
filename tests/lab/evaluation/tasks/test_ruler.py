import json
import re
from collections import Counter

import pytest

from h2okv.config import CacheConfig
from h2okv_lab.evaluation.model import ModelUnderTest
from h2okv_lab.evaluation.tasks.ruler import KINDS, Ruler

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"The river of town {n} is the Ash{n}. It is long and slow.",
                    "qas": [
                        {
                            "question": f"Which river is that of town {n}?",
                            "answers": [{"text": f"Ash{n}"}, {"text": f"the Ash{n}"}],
                        },
                        {"question": "Who knows?", "answers": [], "is_impossible": True},
                    ],
                }
                for n in range(60)
            ]
        }
    ]
}
HOTPOT = [
    {
        "question": f"Which sea does the river of town {n} flow into?",
        "answer": f"Sea{n}",
        "context": [[f"Town {n}", ["It lies ", f"on Ash{n}."]], [f"Ash{n}", [f"Into Sea{n}."]]],
    }
    for n in range(60)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ruler")
    (path / "dev-v2.0.json").write_text(json.dumps(SQUAD))
    (path / "hotpot_dev_distractor_v1.json").write_text(json.dumps(HOTPOT))
    return path


def prepared(subject, name, folder, **options):
    task = Ruler(name, data=folder, **{"length": 1024, "limit": 3} | options)
    task.prepare(subject, [CacheConfig("full")])
    return task


@pytest.mark.parametrize("name", KINDS)
def test_contexts_are_as_long_as_the_length_allows(subject, folder, name):
    task = prepared(subject, name, folder)
    assert len(task.samples) == 3
    for context, question, answers, _ in task._questions:
        total = len(context) + len(question) + task.max_new_tokens
        assert 0.85 * 1024 <= total <= 1024
        text = subject.decode(context)
        assert all(answer in text for answer in answers)
        assert subject.decode(question).rstrip().endswith((":", "is", "are"))
    first = [entry[:3] for entry in task._questions]
    assert first == [entry[:3] for entry in prepared(subject, name, folder)._questions]
    assert first[0] != first[1]


def sample(subject, name, folder, number=0, length=1024):
    task = Ruler(name, data=folder, length=length)
    return task.sample(number, lambda sample: len(subject.encode(" ".join(sample[:3]))))


@pytest.mark.parametrize(
    "name, needles, answers, kinds",
    [
        ("niah_single_1", 1, 1, ("words", "numbers")),
        ("niah_single_2", 1, 1, ("words", "numbers")),
        ("niah_single_3", 1, 1, ("words", "uuids")),
        ("niah_multikey_1", 4, 1, ("words", "numbers")),
        ("niah_multikey_2", None, 1, ("words", "numbers")),
        ("niah_multikey_3", None, 1, ("uuids", "uuids")),
        ("niah_multivalue", 4, 4, ("words", "numbers")),
        ("niah_multiquery", 4, 4, ("words", "numbers")),
    ],
)
def test_needles_are_hidden_as_in_the_paper(subject, folder, name, needles, answers, kinds):
    forms = {"numbers": r"\d{7}", "words": r"[a-z]+-[a-z]+", "uuids": r"[0-9a-f-]{36}"}
    context, question, prefix, expected = sample(subject, name, folder)
    pattern = r"secret (\w+) of ([\w-]+) is ([\w-]+)\."
    pairs = re.findall(pattern, context)
    assert len(pairs) == needles if needles else len(pairs) > 5
    assert {f"{noun}s" for noun, *_ in pairs} == {kinds[1]}
    for _, key, value in pairs:
        assert re.fullmatch(forms[kinds[0]], key) and re.fullmatch(forms[kinds[1]], value)
    assert len(expected) == answers
    assert {v for _, key, v in pairs if key in question and key in prefix} == set(expected)
    assert prefix.endswith(" are" if answers > 1 else " is")


def test_variables_form_a_chain(subject, folder):
    context, question, prefix, names = sample(subject, "vt", folder)
    value = re.search(r"value (\d{5})", question)[1]
    assert value in prefix and len(set(names)) == 5
    text = context.partition("\n\nThe text below")[2]  # after the solved example
    steps = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
    assert list(steps) == names and steps[names[0]] == value
    assert [steps[name] for name in names[1:]] == names[:-1]


def test_common_words_are_ten_times_as_frequent(subject, folder):
    context, *_, answers = sample(subject, "cwe", folder, length=4096)
    text = context.rpartition("Remember which words")[2]
    counts = Counter(re.findall(r"\d+\. (\S+)", text))
    assert {word for word, _ in counts.most_common(10)} == set(answers)
    assert set(counts.values()) == {30, 3}


def test_coded_words_follow_zipfs_law(subject, folder):
    context, *_, answers = sample(subject, "fwe", folder, length=4096)
    counts = Counter(context.partition("text occurs: ")[2].split()).most_common(4)
    assert [word for word, _ in counts] == ["....", *answers]
    for rank, (_, count) in enumerate(counts, start=1):
        assert count == pytest.approx(counts[0][1] / rank**2, abs=1)


def test_scores_are_rulers(folder):
    needles, questions = Ruler("niah_multivalue"), Ruler("qa_1", data=folder)
    assert needles.judge("it is 12 and AB", ["12", "ab", "x", "y"])["string_match"] == 0.5
    assert questions.judge("it is ab", ["12", "AB"])["string_match"] == 1
    assert questions.judge("it is", ["12", "AB"])["string_match"] == 0


def test_a_question_comes_after_the_cache_is_compressed(subject, chat_tokenizer, folder):
    task = prepared(subject, "niah_single_1", folder, length=512, limit=1)
    results = dict(task.run(subject, [CacheConfig("full")], task.samples, 0))
    assert set(results[0][0]) == {"expected", "string_match", "text"}
    chat = ModelUnderTest(subject.load, subject.config, chat_tokenizer, "bundled", 2048)
    ((context, question, *_),) = prepared(chat, "vt", folder, limit=1)._questions
    assert "user" in chat.decode(context) and "assistant" not in chat.decode(context)
    assert re.search(r"other variables\?\s.*assistant.*are:$", chat.decode(question), re.S)


def test_what_is_missing_is_said(subject, folder, tmp_path):
    with pytest.raises(ValueError, match="task of RULER 'qa'.*qa_1"):
        Ruler("qa")
    with pytest.raises(ValueError, match="data file 'dev-v2.0.json' is not in"):
        prepared(subject, "qa_1", tmp_path)
    with pytest.raises(ValueError, match="cwe makes .* tokens for a length of 200"):
        prepared(subject, "cwe", folder, length=200)
