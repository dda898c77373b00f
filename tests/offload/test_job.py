"""A job's prompts, results and texts: what is refused, resumed, and read by the model."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, LlamaConfig

from h2okv.models.loading import Described, resolve_model
from h2okv.offload.job import Job, Prompt, PromptFile, Summary, TextCodec

SETTINGS = {"max_new_tokens": 4, "policy": "h2o"}
MESSAGES = [{"role": "user", "content": "the cat"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write(tmp_path, text):
    path = tmp_path / "in.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_prompts_come_back(tmp_path):
    path = write(tmp_path, '\ufeff{"id": 1, "prompt": "ä"}\r\n\n\ufeff{"id": "1", "prompt": ["?"]}')
    file = PromptFile(path)
    assert list(file.lines) == ["1", '"1"']
    read = [*reversed(file.lines.values())]
    assert [prompt[:2] for prompt in read] == [("1", ["?"]), (1, "ä")]


def test_a_line_without_an_id_has_its_number(tmp_path):
    file = PromptFile(write(tmp_path, '\n{"prompt": "a"}\n{"id": "x", "prompt": "b"}\n'))
    assert list(file.lines) == ["2", '"x"']
    assert file.lines["2"][:2] == (2, "a")


def test_messages_come_back(tmp_path):
    line = json.dumps({"id": 1, "messages": MESSAGES})
    assert PromptFile(write(tmp_path, line)).lines["1"].content == MESSAGES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": 1, "prompt": "a"}\n{"id": 2', "line 2 of .* is not JSON"),
        ('["id", "prompt"]\n', "line 1 of .* is not a JSON object; give {"),
        (b'{"id": 1, "prompt": "\xe9"}\n', "line 1 of .* is not UTF-8 text"),
        ('{"id": null, "prompt": "a"}\n', "line 1 of .*: id null is not a name"),
        ('{"id": 2, "prompt": "a"}\n{"prompt": "b"}\n', "line 2 of .*: id 2 is that of line 1"),
        ('{"id": true, "prompt": "a"}\n', "id true is not a name"),
        ('{"id": 1.5, "prompt": "a"}\n', "id 1.5 is not a name"),
        ('{"id": 1, "messages": "a"}\n', "line 1 of .*: messages must be a list, got 'a'"),
        ('{"id": 1, "messages": [], "prompt": "a"}\n', "both prompt and messages"),
        (
            '{"id": 1, "prompt": "a"}\n\n{"id": 1, "prompt": "b"}\n',
            "line 3 of .*: id 1 is that of line 1",
        ),
        ("\n\n", "has no prompts"),
    ],
)
def test_bad_lines(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        PromptFile(write(tmp_path, text))


def test_a_line_has_the_fields_of_a_request(tmp_path):
    line = {"id": 1, "messages": MESSAGES, "max_completion_tokens": 3, "temperature": None,
            "top_k": -1, "logit_bias": {"5": 2}, "user": "me", "stream": False, "model": "m",
            "continue_final_message": False, "metadata": {"a": 1}, "anything": None}  # fmt: skip
    file = PromptFile(write(tmp_path, json.dumps(line)))
    prompt = file.lines["1"]
    assert prompt.sampling == {"max_tokens": 3, "top_k": 0, "logit_bias": {5: 2}}
    assert prompt.fields == {"continue_final_message": False}


def openai_line(name="r", url="/v1/chat/completions", method="POST", **body):
    body = body or {"messages": MESSAGES}
    return {"custom_id": name, "method": method, "url": url, "body": {"model": "m", **body}}


def test_lines_in_openais_batch_format(tmp_path):
    lines = [
        openai_line("a", messages=MESSAGES, max_tokens=8, stop="x"),
        openai_line("b", "/v1/completions", prompt="the cat"),
        {"id": 3, "prompt": "a cat"},
    ]
    file = PromptFile(write(tmp_path, "\n".join(map(json.dumps, lines))))
    assert list(file.lines) == ['"a"', '"b"', "3"]
    first, second, third = file.lines.values()
    assert (first.id, first.content, first.url) == ("a", MESSAGES, "/v1/chat/completions")
    assert first.sampling == {"max_tokens": 8, "stop": ["x"]}
    assert (second.content, second.url, third.url) == ("the cat", "/v1/completions", None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a", "extra": 1}, "line 2 of .*: extra is not known; leave it out"),
        ({"prompt": "a", "max_token": 1}, r"max_token is not known; did you mean max_tokens\?"),
        ({"id": 5}, "neither prompt nor messages"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be a whole number of 1 or more, got 0"),
        ({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "contradict each other"),
        ({"prompt": "a", "stream": True}, "stream=True: the answers of a batch are whole"),
        ({"prompt": "a", "n": 2}, "n=2: a line of a batch has one answer"),
        ({"prompt": "a", "logprobs": 1}, "logprobs=1: a batch has no log-probabilities"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools=.*: a batch calls no tools"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "plain text"),
        ({"custom_id": "a"}, "url is missing; give /v1/chat"),
        ({"custom_id": "a", "prompt": "b"}, "custom_id is for a line with a body; give id instead"),
        ({"body": {}}, "custom_id is missing; give a text"),
        (openai_line(5), "custom_id must be a text, got 5"),
        (openai_line(url="/v1/embeddings"),
         "url must be /v1/chat/completions or /v1/completions, got '/v1/emb"),
        (openai_line(method="GET"), "method must be POST, got 'GET'"),
        ({**openai_line(), "id": 5}, "id is not known"),
        (openai_line(prompt="a"), "body.messages is missing|body.prompt is not known"),
        (openai_line(messages=MESSAGES, extra=1), "line 2 of .*: body.extra is not known"),
        (openai_line(messages=MESSAGES, n=2), "body.n=2: a line of a batch has one answer"),
        (openai_line(messages="a"), "body.messages must be a list, got 'a'"),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_are_refused_by_their_line(tmp_path, line, words):
    text = "\n".join(map(json.dumps, [{"id": "first", "prompt": "a"}, line]))
    with pytest.raises(ValueError, match=words):
        PromptFile(write(tmp_path, text))


def test_a_prompt_with_other_parameters_is_another(tmp_path):
    lines = [{"prompt": "a"}, {"prompt": "a", "max_tokens": 3}, {"prompt": "a", "user": "me"}]
    file = PromptFile(write(tmp_path, "\n".join(map(json.dumps, lines))))
    first, second, third = (line.digest for line in file.lines.values())
    assert first == third != second


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="'.*nowhere.jsonl' cannot be read.*JSONL"):
        PromptFile(tmp_path / "nowhere.jsonl")


def record(name, **values):
    return {"id": name, "text": "…", "prompt_digest": "d"} | values


@pytest.fixture
def open_job(tmp_path):
    """Opens the results of some prompts."""

    def make(settings=SETTINGS, **prompts):
        prompts = prompts or {"a": "x"}
        lines = [json.dumps({"id": name, "prompt": text}) for name, text in prompts.items()]
        prompt_file = PromptFile(write(tmp_path, "\n".join(lines)))
        return Job(tmp_path / "out.jsonl", settings, prompt_file)

    return make


def test_results_are_there_again(open_job):
    with open_job() as first:
        first.append([record("a"), record(1, error="no")])
        first.append([record("b")])
    with open_job() as second:
        assert list(second.finished) == ['"a"', "1", '"b"']
        assert second.num_errors == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"some notes of mine", "line 1 of .* is not a result of h2okv batch"),
        (b"some notes\nof mine\n", "line 1 of .* is not JSON"),
        (b'{"id": "a", "text": "x"}\n', "line 1 of .* is not a result of h2okv batch"),
        (b'{"id": "a", "text": "x", "prompt_digest": "d"}\n', "cannot be read"),
    ],
)
def test_a_result_file_of_another_program_is_not_changed(open_job, tmp_path, content, words):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        open_job()
    assert path.read_bytes() == content


def test_other_settings(open_job):
    with open_job() as file:
        file.append([record("a")])
    with pytest.raises(ValueError, match="begun with max_new_tokens 4, not 5"):
        open_job(SETTINGS | {"max_new_tokens": 5})


def test_other_prompts(open_job):
    with open_job(a="one", b="two") as job:
        job.append([record("a", prompt_digest=job.prompts.lines['"a"'].digest)])
        job.check_prompts()
    with (
        open_job(a="changed") as job,
        pytest.raises(ValueError, match='another prompt with id "a"'),
    ):
        job.check_prompts()
    with (
        open_job(b="two") as job,
        pytest.raises(ValueError, match='id "a", which is not in the input'),
    ):
        job.check_prompts()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("bundled"))


@pytest.fixture
def codec(tokenizer, monkeypatch):
    """Make a codec with a chat template, if one is passed, or one that continues texts."""

    def make(template=None, is_raw=False):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        config = LlamaConfig(vocab_size=len(tokenizer))
        codec = TextCodec(Described("model", "", config, tokenizer, 256), is_raw=is_raw)

        def encode(content, fields=None):
            return codec.sequence(Prompt(1, content, "", fields or {}), None).prompt

        return SimpleNamespace(encode=encode)

    return make


def test_a_prompt_is_a_users_message_where_the_model_has_a_chat_template(codec, tokenizer):
    plain = codec().encode("the cat")
    assert plain == tokenizer("the cat")["input_ids"]
    assert codec(TEMPLATE, is_raw=True).encode("the cat") == plain
    chat = tokenizer("<user>the cat<assistant>", add_special_tokens=False)["input_ids"]
    assert codec(TEMPLATE).encode("the cat") == chat
    assert codec(TEMPLATE).encode(MESSAGES) == chat


def test_messages_for_a_model_without_a_template_are_a_plain_dialogue(codec, tokenizer):
    assert codec().encode(MESSAGES) == tokenizer("User: the cat\n\nAssistant:")["input_ids"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "the prompt is not a text"),
        (3, "the prompt is not a text"),
        (" ", "the prompt is not a text"),
        ("\ud800", "half of a surrogate pair"),
        ("cat " * 300, r"context of 256 tokens, got \d+ and 1; shorten it, or add --cache"),
        ([], "messages is empty"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        (["a"], r"messages\[0\] must be a message such as"),
        ([{"role": "robot", "content": "a"}], r"messages\[0\].role must be system, developer"),
        ([{"role": "function", "content": "a"}], r"messages\[0\].role must be .* got 'function'"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content has half of a surrog"),
    ],
)
def test_prompts_that_cannot_be_served(codec, prompt, words):
    for template in (None, TEMPLATE):
        with pytest.raises(ValueError, match=words):
            codec(template).encode(prompt)


def test_messages_are_read_as_the_server_reads_them(codec):
    system = {"role": "system", "content": "Be kind."}
    message = {"role": "user", "content": [{"type": "text", "text": "the "}, "cat"]}
    for template in (None, TEMPLATE):
        encode = codec(template).encode
        assert encode([system, *MESSAGES]) == encode([system | {"role": "developer"}, message])
        empty = {"role": "assistant", "content": None}
        assert encode([*MESSAGES, empty, *MESSAGES]) == encode(
            [*MESSAGES, empty | {"content": ""}, *MESSAGES]
        )


def test_a_final_assistant_message_is_continued(codec, tokenizer):
    chat = [*MESSAGES, {"role": "assistant", "content": "sat on"}]
    plain = tokenizer("User: the cat\n\nAssistant: sat on")["input_ids"]
    assert codec().encode(chat) == plain
    begun = tokenizer("<user>the cat<assistant>sat on", add_special_tokens=False)["input_ids"]
    assert codec(TEMPLATE).encode(chat) == begun


def test_variables_of_a_template_reach_a_prompt_too(codec, tokenizer):
    encode = codec("{{ mood }}{{ messages[0].content }}").encode
    expected = tokenizer("goodthe cat", add_special_tokens=False)["input_ids"]
    fields = {"chat_template_kwargs": {"mood": "good"}}
    assert encode("the cat", fields) == encode(MESSAGES, fields) == expected


def test_messages_that_no_template_takes(codec):
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        codec(refusing).encode(MESSAGES)
    with pytest.raises(ValueError, match="leave out --raw"):
        codec(TEMPLATE, is_raw=True).encode(MESSAGES)


def test_the_summary_counts_one_prompt_as_one():
    assert Summary(1, 0, 1).to_text().startswith("1 prompt, 1 with an error record, ")
    assert Summary(2, 1, 0).to_text().startswith("2 prompts, 1 of them finished before, ")
