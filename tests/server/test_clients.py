"""What ordinary clients send beside the text: hints are no reason for a 400, requests are."""

import codecs
import gzip
import json
import urllib.error
import urllib.request

import openai
import pytest

import h2okv
from h2okv.prompts.readers import PromptLimits
from h2okv.server.tokenization import PromptReader

USER = {"role": "user", "content": "Who are you?"}
CHAT = {"model": "fake", "messages": [USER], "max_tokens": 1}
TEXT = {"model": "fake", "prompt": "Who are you?", "max_tokens": 1}
RESPONSE = {"model": "fake", "input": "Who are you?", "max_output_tokens": 1}
CACHED = {"type": "text", "text": "Who are you?", "cache_control": {"type": "ephemeral"}}


NULLS = [
    "temperature", "stop", "n", "seed", "logprobs", "stream", "stream_options", "logit_bias", "h2o",
    "user", "top_k", "reasoning_effort",
]  # fmt: skip


def send(served, path, body):
    if not body.get("stream"):
        return served.client().post(path, body=body, cast_to=object)
    data = json.dumps(body).encode()
    status, events = ask(served, f"/v1{path}", data=data, Content_Type="application/json")
    assert status == 200 and events.endswith(b"data: [DONE]\n\n")
    return events


@pytest.mark.parametrize(
    "change",
    [
        {"anything": None, "everything": [], "nothing": {}},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
        {"include_reasoning": True, "reasoning": {"effort": "low"}, "verbosity": "low"},
        {"stream": True, "stream_options": {"continuous_usage_stats": False, "x": None}},
        {"thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}},
        {"user": "me", "metadata": {"a": 5}, "store": True, "service_tier": "auto",
         "prompt_cache_key": "k", "parallel_tool_calls": True, "safety_identifier": "s"},
        {"tools": [], "tool_choice": "auto", "functions": None, "response_format": None},
        {"skip_special_tokens": True, "use_beam_search": False, "min_tokens": 0},
        {"max_tokens": 1.0, "n": 1.0, "top_k": -1, "seed": 5.0}, dict.fromkeys(NULLS),
        {"tool_choice": "none", "modalities": ["text"], "response_format": {"type": "text"},
         "prediction": {"type": "content", "content": "x"}},
        {"messages": [{"role": "user", "content": [CACHED]}]},
        {"messages": [{**USER, "tool_calls": None, "reasoning_content": None, "mood": None}]},
    ],
)  # fmt: skip
def test_client_hints_change_nothing(served, fake, change):
    for path, body in (("/chat/completions", CHAT), ("/completions", TEXT)):
        if path == "/completions":
            change = {name: value for name, value in change.items() if name != "messages"}
        send(served, path, body)
        send(served, path, {**body, **change})
    read = [(tokens, params.max_tokens) for tokens, params, _ in fake.requests]
    assert read[0] == read[1] and read[2] == read[3]


@pytest.mark.parametrize(
    "change",
    [
        {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "top_logprobs": 0},
        {"truncation": "disabled", "background": False, "anything": None, "metadata": None},
        {"input": [{"role": "user", "content": [{**CACHED, "type": "input_text"}]}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER]},
    ],
)
def test_client_hints_change_no_response(served, fake, change):
    send(served, "/responses", RESPONSE)
    send(served, "/responses", {**RESPONSE, **change})
    assert fake.requests[0][0] == fake.requests[1][0]


def test_engine_error_names_the_field(serve, make_llama, bundled_tokenizer):
    engine = h2okv.AsyncLLM(make_llama(), bundled_tokenizer, heavy=8, recent=8, max_num_seqs=1)
    client = serve(engine).client()
    bodies = {"logit_bias": {"logit_bias": {"99999999": 5}}, "n": {"n": 3}}
    for param, change in bodies.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/completions", body={**TEXT, **change, "prompt": [5]}, cast_to=object)
        assert caught.value.body["param"] == param


@pytest.mark.parametrize("switch", [None, "continue_final_message", "add_generation_prompt"])
def test_final_assistant_message_is_continued(served, fake, switch):
    begun = {"role": "assistant", "content": "I am the"}
    more = {} if switch is None else {"extra_body": {switch: True}}
    answer = served.client().chat.completions.create(
        model="fake", messages=[USER, begun], max_tokens=4, **more
    )
    end = "\n\nAssistant:" if switch == "add_generation_prompt" else ""
    text = f"User: Who are you?\n\nAssistant: I am the{end}"
    assert list(fake.requests[-1][0]) == fake.tokenizer(text)["input_ids"]
    assert answer.choices[0].message.role == "assistant"
    response = {"input": [USER, begun], **({} if switch is None else {switch: True})}
    send(served, "/responses", {**RESPONSE, **response})
    assert fake.requests[-1][0] == fake.requests[-2][0]


def test_leading_space_of_a_continued_message_stays(bundled_tokenizer):
    from h2okv.prompts.messages import Conversation

    reader = PromptReader(bundled_tokenizer)
    begun = {"role": "assistant", "content": "I am"}
    assert reader.read(Conversation([USER])).strips_start
    assert not reader.read(Conversation([USER, begun])).strips_start
    assert reader.read(Conversation([USER, begun])).stops


def test_prompt_of_max_model_len_is_accepted(serve, make_fake):
    fake = make_fake()
    fake.limits = PromptLimits(len(fake.tokenizer), 4096, 512)
    served = serve(fake)
    (model,) = served.client().models.list()
    assert model.max_model_len == 512
    send(served, "/completions", {**TEXT, "prompt": [7] * model.max_model_len})
    with pytest.raises(openai.BadRequestError, match="at most 512 tokens"):
        send(served, "/completions", {**TEXT, "prompt": [7] * (model.max_model_len + 1)})
    fake.limits = PromptLimits(len(fake.tokenizer), None, 512)
    assert served.client().models.retrieve("fake").max_model_len == 512


def ask(served, path, method="POST", data=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(served.address + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


PATHS = ["/", "/health", "/metrics", "/stats", "/v1/models", "/v1/models/fake"]


@pytest.mark.parametrize("path", PATHS)
def test_head_equals_get_without_a_body(served, path):
    assert ask(served, path, "HEAD") == (200, b"")
    assert ask(served, path, "GET")[0] == 200


def test_body_with_bom_or_compression(served):
    data, kind = json.dumps(TEXT).encode(), {"Content_Type": "application/json"}
    assert ask(served, "/v1/completions", data=codecs.BOM_UTF8 + data, **kind)[0] == 200
    for encoding in ("gzip", "br"):
        kind["Content_Encoding"] = encoding
        status, answer = ask(served, "/v1/completions", data=gzip.compress(data), **kind)
        error = json.loads(answer)["error"]
        assert status == 415 and error["code"] == "unsupported_media_type"
        assert f"Content-Encoding '{encoding}' is not supported" in error["message"]
    kind["Content_Encoding"] = "identity"
    assert ask(served, "/v1/completions", data=data, **kind)[0] == 200
