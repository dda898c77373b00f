"""`benchmarks/bfcl.py`: which calls count as right."""

import json

import pytest


@pytest.fixture
def bfcl(import_benchmark):
    return import_benchmark("bfcl")


@pytest.mark.parametrize(
    ("arguments", "answers", "right"),
    [
        ({"a": 10}, {"a": [10], "unit": ["cm", ""]}, True),
        ({"a": 10}, {"a": [10], "unit": ["cm"]}, False),
        ({"a": 10, "b": 1}, {"a": [10]}, False),
        ({"a": 10.0}, {"a": [10]}, True),
        ({"a": "10"}, {"a": [10]}, False),
        ({"a": True}, {"a": [1]}, False),
        ({"a": 1}, {"a": [True, ""]}, False),
        ({"a": "new  York!"}, {"a": ["NY", "New York"]}, True),
        ({"a": None}, {"a": ["", 1]}, False),
        ({"a": [1, 2.0]}, {"a": [[1.0, 2]]}, True),
        ({"a": [2, 1]}, {"a": [[1, 2]]}, False),
        ({"a": {"m": 2}}, {"a": [{"m": [1, 2], "n": [""]}]}, True),
        ({"a": {"m": 3}}, {"a": [{"m": [1, 2]}]}, False),
    ],
)
def test_arguments_are_among_their_answers(bfcl, arguments, answers, right):
    assert bfcl.agrees(arguments, answers) is right


def test_a_call_is_the_only_one_and_names_the_function(bfcl, tmp_path):
    name, call = "BFCL_v4_multiple.json", {"name": "f", "arguments": {"a": 1}}
    parameters = {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "any"}}}
    question = {
        "id": "x", "question": [[{"role": "user", "content": "Add."}]],
        "function": [{"name": "f", "description": "Add.", "parameters": parameters}],
    }  # fmt: skip
    (tmp_path / "possible_answer").mkdir()
    for path, line in (
        (tmp_path / name, question),
        (tmp_path / "possible_answer" / name, {"id": "x", "ground_truth": [{"f": {"a": [1]}}]}),
    ):
        path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    (case,) = bfcl.read_cases(tmp_path, "multiple", 1, ())
    schema = case["chat"].tools[0]["function"]["parameters"]
    assert schema == {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}}
    text = json.dumps(call)
    for answer, expected in (
        (text, (True, True)),
        (f"```json\n{text}\n```", (True, True)),
        (f"<tool_call>{text}</tool_call><tool_call>{text}</tool_call>", (False, False)),
        (text.replace("1", "2"), (True, False)),
        (text.replace('"f"', '"g"'), (False, False)),
        ("The sum is 1.", (False, False)),
    ):
        assert bfcl.check(answer, case["chat"], case["answer"]) == expected
    with pytest.raises(ValueError, match="cannot be read"):
        bfcl.read_cases(tmp_path / "nowhere", "simple", 1, ())
