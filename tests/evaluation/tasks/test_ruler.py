import json

import pytest

from h2okv.config import CacheConfig
from h2okv.evaluation.tasks.ruler import Recall, read_ruler


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def questions(tmp_path, novel):
    texts = {
        (name, city): f"{novel[:1200]} The city of {name} is {city}. {novel[1200:1500]}"
        for name, city in (("Maria", "Vienna"), ("Jasper", "Lisbon"))
    }
    asked = [
        {"input": f"{text}\nThe city of {name} is", "outputs": [city]}
        for (name, city), text in texts.items()
    ]
    return read_ruler(written(tmp_path / "r.jsonl", *asked))


def test_the_last_line_is_the_question(questions, novel):
    assert questions[0].context.endswith(novel[1200:1500])
    assert questions[0].question == "\nThe city of Maria is"
    assert questions[1].answers == ("Lisbon",)


@pytest.mark.parametrize("compression", ["query-aware", "query-agnostic"])
def test_values_are_recalled_with_everything_kept(subject, questions, compression):
    task = Recall("cities", questions, compression, max_new_tokens=8)
    task.prepare(subject, [CacheConfig("full")])
    results = {}
    for found in task.run(subject, CacheConfig("full"), task.samples(), 0):
        results |= found
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
        Recall("cities", questions, "query-aware", limit=0)
