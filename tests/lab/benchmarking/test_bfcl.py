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
        ({"a": 10}, {"a": [10], "unit": ["cm"]}, False), ({"a": 10, "b": 1}, {"a": [10]}, False),
        ({"a": 10.0}, {"a": [10]}, True), ({"a": "10"}, {"a": [10]}, False),
        ({"a": True}, {"a": [1]}, False), ({"a": 1}, {"a": [True, ""]}, False),
        ({"a": "new  York!"}, {"a": ["NY", "New York"]}, True),
        ({"a": None}, {"a": ["", 1]}, False), ({"a": [1, 2.0]}, {"a": [[1.0, 2]]}, True),
        ({"a": [2, 1]}, {"a": [[1, 2]]}, False),
        ({"a": {"m": 2}}, {"a": [{"m": [1, 2], "n": [""]}]}, True),
        ({"a": {"m": 3}}, {"a": [{"m": [1, 2]}]}, False),
    ],
)  # fmt: skip
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


def test_later_turns_follow_the_true_calls_of_earlier_ones(bfcl, tmp_path):
    documented = {"name": "add", "description": "Add.", "response": {"type": "dict"}}
    documented["parameters"] = {"type": "dict", "properties": {"a": {}, "b": {}}}
    questions = [[{"role": "user", "content": text}] for text in ("One.", "Two.", "Three.")]
    line = {"id": "x", "question": questions, "involved_classes": ["MathAPI"]}
    truth = {"id": "x", "ground_truth": [["add(1, b='c')", "add(2)"], [], ["add(a=[3])"]]}
    for folder in ("multi_turn_func_doc", "possible_answer"):
        (tmp_path / folder).mkdir()
    name = "BFCL_v4_multi_turn_base.json"
    for path, content in (
        (tmp_path / name, line),
        (tmp_path / "possible_answer" / name, truth),
        (tmp_path / "multi_turn_func_doc" / "math_api.json", documented),
    ):
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    (case,) = bfcl.read_cases(tmp_path, "turns", 1, ())
    assert case["answer"] == [{"add": {"a": [[3]]}}]
    chat = case["chat"]
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "user", "user"]
    calls = [call for message in chat.messages for call in message.get("tool_calls") or ()]
    first, second = (call["function"]["arguments"] for call in calls)
    assert (json.loads(str(first)) if isinstance(first, str) else first) == {"a": 1, "b": "c"}
    assert (json.loads(str(second)) if isinstance(second, str) else second) == {"a": 2}
    assert "response" not in chat.tools[0]["function"]
    with pytest.raises(ValueError, match=r"--counts must be 1 to 1 for turns, got 2"):
        bfcl.read_cases(tmp_path, "turns", 2, ())
