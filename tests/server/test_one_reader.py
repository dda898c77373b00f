"""The fields of a request are read alike by the server, batch files and `LLM.chat`."""

import json
import pickle

import pytest

import h2okv
from h2okv.engine.structured import SchemaError
from h2okv.offload.job import PromptFile
from h2okv.prompts.messages import read_conversation
from h2okv.prompts.readers import FieldError, PromptTooLongError
from h2okv.server.protocol import ChatRequest, ResponsesRequest

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 5}'}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "4"}


def refusal(read, *args, **kwargs):
    with pytest.raises(FieldError) as caught:
        read(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def refused_line(tmp_path):
    """Return a function that gives the sentence for a line of a batch file."""

    def read(**fields):
        path = tmp_path / "in.jsonl"
        path.write_text(json.dumps({"messages": [USER], **fields}))
        with pytest.raises(ValueError, match="line 1 of") as caught:
            PromptFile(path)
        return str(caught.value).partition(": ")[2]

    return read


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 101}, {"top_p": 0}, {"top_k": -2}, {"stop": [""]}, {"stop": ["a"] * 65},
        {"stop_token_ids": [-1]}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}},
        {"seed": "1"}, {"ignore_eos": 1}, {"min_p": True}, {"max_tokens": 2**63},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_sampling_field_gets_the_same_sentence_everywhere(refused_line, field):
    sentence = refusal(h2okv.SamplingParams, **field)
    (name,) = field
    assert sentence.startswith(name) and sentence.endswith(".") and sentence.count(". ") == 0
    assert refusal(ChatRequest, {"model": "m", "messages": [USER], **field}) == sentence
    assert refused_line(**field) == sentence


@pytest.mark.parametrize(
    "message",
    [{"role": "robot", "content": "Hi"}, {**USER, "mood": "good"}, {"role": "user", "content": 5},
     {"type": "item_reference"}, {**USER, "content": [{"type": "text"}]}],
    ids=str,
)  # fmt: skip
def test_a_wrong_message_gets_the_same_sentence_everywhere(message):
    sentence = refusal(read_conversation, {"messages": [USER, message]})
    assert sentence.startswith("messages[1]")
    assert refusal(ChatRequest, {"model": "m", "messages": [USER, message]}) == sentence
    response = refusal(ResponsesRequest, {"model": "m", "input": [USER, message]})
    assert response == sentence.replace("messages[1]", "input[1]")
    several = refusal(read_conversation, {"messages": [USER, message]}, ("messages", 2))
    assert several == sentence.replace("messages[1]", "messages[2][1]")


def test_an_error_crosses_processes():
    error = PromptTooLongError.about("prompt", " must have at most 8 tokens, got 9; shorten it")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert again.name == "prompt" and again.code == "context_length_exceeded"
    reason = "the grammar is odd"
    assert pickle.loads(pickle.dumps(SchemaError(reason))).reason.startswith(reason)


def test_tools_and_calls_may_have_either_form():
    tools = [{"type": "function", **FUNCTION}]
    nested = [{"type": "function", "function": FUNCTION}]
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 5}}}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    begun = {"role": "assistant", "content": "So"}
    choice = {"type": "function", "name": "f"}
    items = {"messages": [USER, begun, CALL, RESULT], "tools": tools, "tool_choice": choice}
    chat = {"messages": [USER, {**begun, "tool_calls": [call]}, result], "tools": nested}
    read = ChatRequest({"model": "m", **items})
    assert read.prompts[0].messages == read_conversation(chat).messages
    assert read.prompts[0].tools == read_conversation(chat).tools == nested
    assert read.call_options["only_calls"]
