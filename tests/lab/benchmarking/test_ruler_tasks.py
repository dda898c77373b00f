import json
import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.prompts.chat_template import encode
from h2okv_lab.evaluation.sweep import Surroundings, load_experiment

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
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|bos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LENGTHS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}  # of answers
NEEDLES = [
    f"niah_{name}"
    for name in (
        "single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue",
        "multiquery",
    )
]  # fmt: skip
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


@pytest.fixture
def script(import_benchmark):
    return import_benchmark("ruler_tasks")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.mark.parametrize("name", [*NEEDLES, *LENGTHS])
def test_contexts_are_as_long_as_the_length_allows(script, tokenizer, folder, name):
    sources = script.Sources(sample_prompt(), folder, 1024)
    lines = [script.generate(name, number, sources, tokenizer) for number in range(2)]
    for line in lines:
        context = line["input"].removesuffix(line["question"])
        question = encode(tokenizer, line["question"], special=False)
        total = len(encode(tokenizer, context)) + len(question) + LENGTHS.get(name, 128)
        assert 0.85 * 1024 <= total <= 1024
        assert all(answer in context for answer in line["outputs"])
        assert line["question"].endswith((":", "is", "are"))
    assert lines[0] == script.generate(name, 0, sources, tokenizer) and lines[0] != lines[1]


@pytest.fixture
def sample(script, tokenizer, folder):
    def make(name, length=1024):
        sources = script.Sources(sample_prompt(), folder, length)
        samples, kind = [], script.KINDS[name]
        record = kind._replace(
            build=lambda *a, **o: samples.append(kind.build(*a, **o)) or samples[-1]
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(script.KINDS, name, record)
            line = script.generate(name, 0, sources, tokenizer)
        return next(s for s in samples if line["input"].startswith(s.context))

    return make


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
def test_needles_are_hidden_as_in_the_paper(sample, name, needles, answers, kinds):
    forms = {"numbers": r"\d{7}", "words": r"[a-z]+-[a-z]+", "uuids": r"[0-9a-f-]{36}"}
    context, question, prefix, expected = sample(name)
    pattern = r"secret (\w+) of ([\w-]+) is ([\w-]+)\."
    pairs = re.findall(pattern, context)
    assert len(pairs) == needles if needles else len(pairs) > 5
    assert {f"{noun}s" for noun, *_ in pairs} == {kinds[1]}
    for _, key, value in pairs:
        assert re.fullmatch(forms[kinds[0]], key) and re.fullmatch(forms[kinds[1]], value)
    assert len(expected) == answers
    assert {v for _, key, v in pairs if key in question and key in prefix} == set(expected)
    assert prefix.endswith(" are" if answers > 1 else " is")


def test_variables_form_a_chain(sample):
    context, question, prefix, names = sample("vt")
    value = re.search(r"value (\d{5})", question)[1]
    assert value in prefix and len(set(names)) == 5
    text = context.partition("\n\nThe text below")[2]  # after the solved example
    steps = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
    assert list(steps) == names and steps[names[0]] == value
    assert [steps[name] for name in names[1:]] == names[:-1]


def test_common_words_are_ten_times_as_frequent(sample):
    context, *_, answers = sample("cwe", length=4096)
    text = context.rpartition("Remember which words")[2]
    counts = Counter(re.findall(r"\d+\. (\S+)", text))
    assert {word for word, _ in counts.most_common(10)} == set(answers)
    assert set(counts.values()) == {30, 3}


def test_coded_words_follow_zipfs_law(sample):
    context, *_, answers = sample("fwe", length=4096)
    counts = Counter(context.partition("text occurs: ")[2].split()).most_common(4)
    assert [word for word, _ in counts] == ["....", *answers]
    for rank, (_, count) in enumerate(counts, start=1):
        assert count == pytest.approx(counts[0][1] / rank**2, abs=1)


def test_in_a_chat_the_question_has_the_end_of_the_template(script, tokenizer, folder):
    sources = script.Sources(sample_prompt(), folder, 1024)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tokenizer.chat_template = TEMPLATE
    line = script.generate("vt", 0, sources, tokenizer)
    context = line["input"].removesuffix(line["question"])
    assert context.startswith("<|user|>") and "assistant" not in context
    assert re.search(r"other variables\?<.*assistant.*are:$", line["question"], re.S)
    tokenizer.chat_template = tokenizer.bos_token + TEMPLATE  # which the tokenizer adds as well
    again = script.generate("vt", 0, sources, tokenizer)
    assert again["input"].startswith("<|user|>")


def test_what_is_missing_is_said(script, tokenizer, folder, tmp_path):
    with pytest.raises(ValueError, match="data file 'dev-v2.0.json' is not in"):
        script.generate("qa_1", 0, script.Sources(sample_prompt(), tmp_path, 1024), tokenizer)
    with pytest.raises(ValueError, match="cwe makes .* tokens for a length of 200"):
        script.generate("cwe", 0, script.Sources(sample_prompt(), folder, 200), tokenizer)


def test_the_experiment_reads_the_files(script, folder, tmp_path, monkeypatch):
    words = ["--model", "bundled", "--data", str(folder), "--out", str(tmp_path / "out")]
    limits = ["--length", "1024", "--limit", "1"]
    monkeypatch.setattr("sys.argv", ["ruler_tasks.py", *words, *limits])
    script.main()
    tasks = load_experiment("ruler").make_tasks(Surroundings(tmp_path / "out", tmp_path))
    assert [task.name for task in tasks] == list(script.KINDS)
    for task in tasks:
        assert task.max_new_tokens == script.KINDS[task.name].max_new_tokens
        assert task.stop == () and len(task.questions) == 1
        assert task.match == ("any" if task.name.startswith("qa") else "all")
