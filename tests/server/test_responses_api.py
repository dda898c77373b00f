"""OpenAI's Responses API, by OpenAI's own client; and tokens as vLLM's server tells them."""

import openai
import pytest


def read(fake):
    return fake.tokenizer.decode(list(fake.requests[-1][0]), skip_special_tokens=True)


def test_complete_response(served, fake):
    create = served.client().responses.create
    response = create(
        model="fake", instructions="Be brief.", input="Who are you?", max_output_tokens=5,
        temperature=0, metadata={"a": "b"},
    )  # fmt: skip
    assert read(fake) == "Be brief.\n\nUser: Who are you?\n\nAssistant:"
    assert fake.requests[-1][1].max_tokens == 5 and fake.requests[-1][1].temperature == 0
    assert (
        response.status == "incomplete"
        and response.incomplete_details.reason == "max_output_tokens"
    )
    assert response.output_text and response.output_text == response.output_text.lstrip()
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        len(fake.requests[-1][0]),
        5,
    )
    assert response.metadata == {"a": "b"} and response.error is None
    # What it said can be sent back.
    again = [*[{"role": "user", "content": "Hello"}], *response.output]
    again.append({"role": "user", "content": [{"type": "input_text", "text": "And?"}]})
    create(model="fake", input=again, max_output_tokens=1)
    assert (
        read(fake)
        == f"User: Hello\n\nAssistant: {response.output_text}\n\nUser: And?\n\nAssistant:"
    )


@pytest.mark.parametrize(("ending", "status"), [("length", "incomplete"), ("stop", "completed")])
def test_a_streamed_response(served, fake, monkeypatch, ending, status):
    options = dict(model="fake", input="Who are you and what?", max_output_tokens=6)
    monkeypatch.setattr(fake, "ending", ending)
    events = list(served.client().responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{status}",
    ]  # fmt: skip
    text = "".join(event.delta for event in events[4:-4])
    response = events[-1].response
    assert text == events[-4].text == response.output_text
    assert text == served.client().responses.create(**options).output_text
    assert response.id == events[0].response.id and events[0].response.status == "in_progress"
    assert response.output[0].id == events[2].item.id == events[5].item_id
    if status == "completed":  # the client's own bookkeeping takes no other
        with served.client().responses.stream(**options) as stream:
            assert stream.get_final_response().output_text == text


def test_response_with_kept_tokens(served):
    create, h2o = served.client().responses.create, {"h2o": {"kept_every": 2}}
    options = dict(model="fake", input="Who are you?", max_output_tokens=5, extra_body=h2o)
    reports = [event.h2o for event in create(**options, stream=True) if hasattr(event, "h2o")]
    complete = create(**options).output[0].h2o
    assert len(reports) == 3 and complete["kept"] == reports[-1]["kept"]
    assert sum((report["tokens"] for report in reports), []) == complete["tokens"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function, got"),
        ({"tools": [{"type": "function", "name": 5}]}, "tools[0].name", "empty, got 5"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {
            "type": "function", "name": "g"}}, "tool_choice.name", "one of the tools (f), got"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "string"}}]},
         "tools[0].parameters.type", "arguments are an object"),
        ({"input": [{"type": "function_call", "name": ""}]}, "input[0].name", "must be a text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": 5}]},
         "input[0].arguments", "must be JSON in a string, got 5"),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output", "got 5"),
        ({"input": [{"type": "function_call_output", "output": "a", "call_id": 5}]},
         "input[0].call_id", "must be a text"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "got 'web_search_call'"),
        ({"text": {"format": {"type": "json"}}}, "text.format.type", "must be text, json_"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "give a JSON schema"),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "no responses are stored"),
        ({"background": True}, "background", "while the client waits"),
        ({"input": []}, "input", "input is empty; give at least one"),
        ({"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,iVBORw=="}]}]},
         "input[0].content[0].image_url", "are not supported with model type 'llama'"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].output", "is missing"),
        ({"n": 2}, "n", "a response has one output"),
        ({"max_tokens": 2}, "max_tokens", "give max_output_tokens"),
        ({"max_output_token": 2}, "max_output_token", "did you mean max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "give text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include", "include"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
        ({"truncation": "auto"}, "truncation", "truncation"),
        *(({"max_output_tokens": n}, "max_output_tokens", "max_output_tokens") for n in (-1, 99)),
    ],
)  # fmt: skip
def test_unsupported_fields_raise_with_their_names(served, fake, change, param, words):
    body = {"model": "fake", "input": "hello", **change}
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().post("/responses", body=body, cast_to=object)
    assert caught.value.body["param"] == param and words in caught.value.body["message"]
    assert fake.requests == []


def test_error_in_the_middle_of_a_stream(served, fake):
    fake.failing[3] = RuntimeError("no")
    try:
        stream = served.client().responses.create(model="fake", input="a b c", stream=True)
        with pytest.raises(openai.APIError, match="failed with an internal error"):
            list(stream)
    finally:
        fake.failing.clear()
