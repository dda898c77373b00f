import json

import pytest

from h2okv.config import CacheConfig
from h2okv_lab.evaluation.plots import plot_needles
from h2okv_lab.evaluation.tasks.recall import NeedleTask, Recall, read_ruler

slow = pytest.mark.slow

FULL = CacheConfig("full")
GRID = {"lengths": (128, 256), "depths": (0.0, 0.5, 1.0), "tries": 2}


def prepared(subject, novel, **options):
    task = NeedleTask("needle", novel, **GRID | options)
    task.prepare(subject, [FULL])
    return task


@slow
def test_needle_length_and_depth(subject, novel):
    task = prepared(subject, novel)
    for context, question, (answer,), columns in task._questions:
        length, depth = columns["length"], columns["depth"]
        assert len(context) + len(question) == length
        text = subject.decode(context)
        before, needle, _ = text.partition(" The city of ")
        assert needle and f" is {answer}." in text
        # It stands at a sentence's end, which may be some tokens away.
        assert len(before) / len(text) == pytest.approx(depth, abs=0.3)
        if depth == 0:
            assert before == ""
        if depth == 1:
            assert text.endswith(f"is {answer}.")


@slow
def test_tries_use_different_needles_and_texts(subject, novel):
    first, second = prepared(subject, novel)._questions[:2]
    assert first != second
    assert prepared(subject, novel)._questions == prepared(subject, novel)._questions
    assert prepared(subject, novel, seed=1)._questions != prepared(subject, novel)._questions


@slow
def test_a_full_cache_finds_what_the_model_can_recall(subject, novel, tmp_path):
    grid = {"lengths": (128, 160), "depths": (0.0, 1.0)}
    rows = []
    for compression in ("query-aware", "query-agnostic"):
        task = prepared(subject, novel, compression=compression, **grid)
        results = {
            n: r for _, f in task.run(subject, [FULL], task.samples, 0) for n, r in f.items()
        }
        assert task.scores(results)["string_match"].value >= 0.75
        details = task.details(results)
        assert [(row["length"], row["depth"]) for row in details] == [
            (128, 0.0), (128, 1.0), (160, 0.0), (160, 1.0),
        ]  # fmt: skip
        rows += [{**task.columns, "cache": "full", **row} for row in details]
    plot_needles(tmp_path / "n.png", rows, "needles")
    assert (tmp_path / "n.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "--lengths must have at least one value"),
        ({"lengths": (5, 5)}, "--lengths must have each value once"),
        ({"depths": (1.5,)}, "--depths must be fractions from 0 to 1, got 1.5"),
        ({"tries": 0}, "--tries 0 is too few"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0 is too few"),
        ({"statement": "The key is 7.", "answer": "8"}, "must contain the answer '8'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NeedleTask("needle", "a text", **options)


@slow
@pytest.mark.parametrize(
    ("length", "message"),
    [(20, "has no room"), (90_000, "too few to hide"), (2040, "context window of 2048")],
)
def test_a_length_without_room_is_refused(subject, novel, length, message):
    with pytest.raises(ValueError, match=message) as caught:
        prepared(subject, novel, lengths=(length,), depths=(0.5,))
    assert "--too-long" not in str(caught.value)  # which this task does not have


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def questions(tmp_path, novel):
    texts = {
        (name, city): f"{novel[:1200]} The city of {name} is {city}. {novel[1200:1500]}"
        for name, city in (("Maria", "Vienna"), ("Jasper", "Lisbon"))
    }
    records = [
        {"input": f"{text}\nThe city of {name} is", "outputs": [city]}
        for (name, city), text in texts.items()
    ]
    return written(tmp_path / "r.jsonl", *records)


def test_the_last_line_is_the_question(questions, novel):
    questions = read_ruler(questions)
    assert questions[0].context.endswith(novel[1200:1500])
    assert questions[0].question == "\nThe city of Maria is"
    assert questions[1].answers == ("Lisbon",)


def test_a_question_of_several_lines_is_a_field(tmp_path):
    line = {"input": "a text\nWhat?\nIt is", "question": "What?\nIt is", "outputs": ["a", "b"]}
    ((context, question, *_),) = read_ruler(written(tmp_path / "r.jsonl", line))
    assert (context, question) == ("a text\n", "What?\nIt is")
    with pytest.raises(ValueError, match="field input has no last line"):
        read_ruler(written(tmp_path / "r.jsonl", line | {"question": "Who?"}))


def test_all_answers_count_or_any(questions):
    every = Recall("cities", questions)
    some = Recall("cities", questions, match="any", stop=())
    assert every.judge("it is 12 and AB", ["12", "ab", "x", "y"])["string_match"] == 0.5
    assert some.judge("it is ab", ["12", "AB"])["string_match"] == 1
    assert some.judge("it is", ["12", "AB"])["string_match"] == 0
    assert some.identity() == {**every.identity(), "match": "any", "stop": []}


@pytest.mark.parametrize("compression", ["query-aware", "query-agnostic"])
def test_values_are_recalled_with_a_full_cache(subject, questions, compression):
    task = Recall("cities", questions, compression=compression, max_new_tokens=8)
    task.prepare(subject, [CacheConfig("full")])
    results = {}
    for _, batch in task.run(subject, [FULL], task.samples, 0):
        results |= batch
    assert [result["string_match"] for result in results.values()] == [1.0, 1.0]
    assert task.scores(results)["string_match"].value == 1.0
    assert task.label == f"cities, compression {compression}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"input": "no question", "outputs": ["a"]}, "field input has no last line"),
        ({"input": "a\nb", "outputs": []}, "field outputs is an empty list"),
        ({"input": "a\nb"}, "has no field outputs"),
    ],
)
def test_a_bad_line_is_refused(tmp_path, line, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_ruler(written(tmp_path / "r.jsonl", line))
    assert "line 1 of" in str(caught.value)


def test_a_limit_of_nothing_is_refused(questions):
    with pytest.raises(ValueError, match="--limit 0 is too few"):
        Recall("cities", questions, limit=0)
