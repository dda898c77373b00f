import copy
import json
import urllib.error
import urllib.request

import openai
import pytest
from tokenizers.processors import TemplateProcessing

BODY = {"model": "fake", "prompt": "once upon a time", "max_tokens": 2}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def refusal(served, path, body) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        served.client().post(path, body=body, cast_to=object)
    error = caught.value.body
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?")) and "\n" not in error["message"]
    return caught.value


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temperture": 1}, "temperture", "not known; did you mean temperature"),
        ({"nonsense": 1}, "nonsense", "nonsense is not known; leave it out"),
        ({"temperature": -1}, "temperature", "must be a number from 0 to 100, got -1"),
        ({"top_p": 0}, "top_p", "leaves no token to draw"),
        ({"max_tokens": 1.5}, "max_tokens",
         "max_tokens must be a whole number of 0 or more, got 1.5"),
        ({"max_tokens": -1}, "max_tokens", "must be a whole number of 0 or more, got -1"),
        ({"max_tokens": 99}, "max_tokens", "max_tokens=99 is more than this server writes"),
        ({"n": 0}, "n", "n must be a whole number of 1 or more, got 0"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128, got 129"),
        ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"stream_options": {}}, "stream_options", "needs stream=true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "is not known"),
        ({"stop": [""]}, "stop[0]", "must be a text that is not empty, got ''"),
        ({"logprobs": 21}, "logprobs", "logprobs must be a whole number from 0 to 20, got 21"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "the key 'x', which is not a token"),
        ({"n": 1000}, "n", "prompts times n must be at most 128, got 1000"),
        ({"best_of": 3}, "best_of", "does not rank outputs"),
        ({"system": "Be brief."}, "system", "a system message is the first of messages"),
        ({"tools": [{"type": "function"}]}, "tools", "tools"),
        ({"echo": True, "logprobs": 21}, "logprobs", "logprobs must be"),
        ({"suffix": "the end"}, "suffix", "suffix='the end': prompts are only continued"),
        ({"prompt": ""}, None, None), ({"prompt": []}, "prompt", "none of the lists empty"),
        ({"prompt": [[]]}, "prompt", "none of the lists empty"),
        ({"prompt": [1, "a"]}, "prompt", "must be a text, tokens, or a list of"),
        ({"prompt": [True]}, "prompt", "must be a text, tokens, or a list of"),
        ({"prompt": {"text": "a"}}, "prompt", "must be a text, tokens, or a list of"),
        ({"prompt": None}, "prompt", "prompt is missing; give a text"),
        ({"prompt": [4096]}, "prompt", "prompt: token must be 0 to 4095 for this model, got 4096"),
        ({"prompt": [-1]}, "prompt", "for this model, got -1"),
        ({"prompt": [10**30]}, "prompt", "for this model, got 1000"),
        ({"h2o": "1000+64"}, "h2o", "= 1064 tokens for this prompt, but this server keeps"),
        ({"h2o": {"cache": "0+0"}}, "h2o", "keep nothing"),
        ({"h2o": "h2o:64,bits=8"}, "h2o", "of a request has kv_bits, which only the engine's"),
        ({"h2o": 256}, "h2o", "h2o must be a text such as '256' or '10%', or an object, got 256"),
        ({"h2o": "much"}, "h2o", "of a request has policy much"),
        ({"h2o": {"heavy": 64}}, "h2o.heavy", "it is part of cache, a text such as"),
        ({"h2o": {"light": 1}}, "h2o.light", "h2o.light is not known"),
        ({"h2o": {"kept_every": 0}}, "h2o.kept_every",
         "h2o.kept_every must be a whole number of 1 or more"),
    ],
)  # fmt: skip
def test_a_bad_completion_names_field_and_remedy(served, fake, change, param, words):
    if words is None:  # it is the model's tokenizer that decides whether nothing is something
        served.client().post("/completions", body={**BODY, **change}, cast_to=object)
        return
    error = refusal(served, "/completions", {**BODY, **change})
    assert error.status_code == 400 and error.body["type"] == "invalid_request_error"
    assert words in error.body["message"]
    if param is not None:
        assert error.body["param"] == param
    assert fake.requests == []


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"functions": [{"name": "f"}]}, "functions", "functions are given as tools"),
        ({"web_search_options": {"a": 1}}, "web_search_options", "no web search"),
        ({"modalities": ["text", "audio"]}, "modalities", "answers are text only"),
        ({"audio": {"voice": "a"}}, "audio", "answers are text only"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]},
         "messages[0].content[0].image_url.url",
         "='data:image/png;base64,iVBORw==': images are not supported with model type 'llama'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs",
         "top_logprobs must be a whole number from 0 to 20, got 21"),
        ({"max_completion_tokens": 7}, "max_tokens", "contradict each other"),
        ({"prompt": "x"}, "prompt", "prompt is not known"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "tools[0].function"),
        ({"min_tokens": 5}, "min_tokens", "min_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens"),
        # A value is blamed on the field that it came in.
        *(({"max_tokens": None, "max_completion_tokens": n}, "max_completion_tokens",
           "max_completion_tokens") for n in (-1, 99)),
    ],
)  # fmt: skip
def test_a_bad_chat_names_field_and_remedy(served, fake, change, param, words):
    error = refusal(served, "/chat/completions", {**CHAT, **change})
    assert error.status_code == 400 and words in error.body["message"]
    if param is not None:
        assert error.body["param"] == param
    assert fake.requests == []


def test_template_error_names_messages(serve, make_fake, bundled_tokenizer):
    fake = make_fake()
    fake.tokenizer = copy.deepcopy(bundled_tokenizer)
    fake.tokenizer.chat_template = "{{ raise_exception('users must not be silent') }}"
    error = refusal(serve(fake), "/chat/completions", CHAT)
    assert error.status_code == 400 and error.body["param"] == "messages"
    assert "does not take these messages (users must not be silent)" in error.body["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_prompt_without_tokens_is_refused(serve, make_fake, bundled_tokenizer, streams):
    fake = make_fake()
    fake.tokenizer = copy.deepcopy(bundled_tokenizer)
    fake.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A", "$A $B")  # no BOS
    error = refusal(serve(fake), "/completions", {**BODY, "prompt": ["a", ""], "stream": streams})
    assert error.status_code == 400 and error.body["param"] == "prompt"
    assert error.body["message"] == "prompt has no tokens; give at least one."
    assert fake.requests == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "word " * 2100}, "prompt must have at most 2048 tokens, got 2103"),
        ({"prompt": "x" * 100_000}, "at most 2048 tokens, got a text of 100000 characters"),
        ({"prompt": [7] * 2049}, "prompt must have at most 2048 tokens, got 2049"),
        (
            {"prompt": [7] * 2040, "max_tokens": 9},
            "got 2040 and 9; shorten it or lower max_tokens.",
        ),
    ],
    ids=["text", "very long text", "tokens", "with its output"],
)
def test_too_long_requests_have_openai_code(served, change, words):
    error = refusal(served, "/completions", {**BODY, **change})
    assert error.status_code == 400 and error.body["code"] == "context_length_exceeded"
    assert words in error.body["message"]


def test_default_max_tokens_fits_the_context(served, fake):
    body = {"model": "fake", "prompt": [7] * 2040}
    served.client().post("/completions", body=body, cast_to=object)
    assert fake.requests[0][1].max_tokens == 8


def test_unknown_model_is_404(served):
    error = refusal(served, "/completions", {**BODY, "model": "gpt-4"})
    assert error.status_code == 404 and error.body["code"] == "model_not_found"
    error = refusal(served, "/chat/completions", {**CHAT, "model": "gpt-4"})
    assert error.status_code == 404 and error.body["param"] == "model"


def post(served, data, content_type="application/json", path="/v1/completions"):
    request = urllib.request.Request(
        served.address + path, data=data, headers={"Content-Type": content_type}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    return caught.value.code, json.loads(caught.value.read())["error"]


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b'{"model": "fake"', b'{"model": "\xff\xfe"}', b"\x00", b'{"a": "\\ud800"}',
     b'{"model": "fake", "prompt": "a", "temperature": NaN}', b"[" * 100_000],
    ids=["nothing", "words", "half", "not UTF-8", "zero", "half a character", "NaN", "deep"],
)  # fmt: skip
def test_body_must_be_json(served, data):
    code, error = post(served, data)
    assert code == 400 and error["code"] == "invalid_json"
    is_deep = data.startswith(b"[[")
    words = "the body is nested deeper than 200" if is_deep else "the body is not JSON in UTF-8 ("
    assert error["message"].startswith(words)
    for no_object in (b"[]", b"5", b'"text"', b"null"):
        code, error = post(served, no_object)
        assert code == 400 and "the body must be a JSON object, got" in error["message"]


def test_content_type_must_be_json(served):
    data = json.dumps(BODY).encode()
    code, error = post(served, data, "application/x-www-form-urlencoded")
    assert code == 415 and "send the header 'Content-Type: application/json'" in error["message"]
    assert post(served, data, "text/plain")[0] == 415


def test_unknown_path_and_method(served):
    assert post(served, b"{}", path="/v1/embeddings")[0] == 404
    code, error = post(served, b"{}", path="/v1/models")
    assert code == 405 and "/v1/chat/completions" in error["message"]
    assert "/v1/models/NAME" in error["message"]
