import copy

import pytest

from h2okv.engine.outputs import OutputDelta

CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "developer", "content": "Be brief."},  # a system message
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "I?"}]},
]
PLAIN = "Be brief.\n\nUser: Who are you?\n\nAssistant: A model.\n\nUser: And I?\n\nAssistant:"


@pytest.fixture
def templated(make_fake, bundled_tokenizer):
    """Return an engine whose tokenizer has a chat template."""
    fake = make_fake()
    fake.tokenizer = copy.deepcopy(bundled_tokenizer)
    fake.tokenizer.chat_template = CHATML
    return fake


def read_by(fake):
    tokens, params, _ = fake.requests[-1]
    return list(tokens), params


def test_chat_without_template(served, fake, bundled_tokenizer):
    answer = served.client().chat.completions.create(model="fake", messages=CHAT, max_tokens=8)
    tokens, params = read_by(fake)
    assert tokens == bundled_tokenizer(PLAIN)["input_ids"]
    assert tokens[0] == bundled_tokenizer.bos_token_id
    assert params.stop == ("\n\nUser:", "\nUser:")
    message = answer.choices[0].message
    assert (
        message.role == "assistant"
        and message.content == "Be brief.\n\nUser"[: len(message.content)]
    )
    assert answer.object == "chat.completion" and answer.usage.completion_tokens == 8


def test_chat_with_template(templated, serve):
    client = serve(templated).client()
    client.chat.completions.create(model="fake", messages=CHAT, max_tokens=2, stop="!")
    tokens, params = read_by(templated)
    text = "<system>Be brief.</s><user>Who are you?</s><assistant>A model.</s><user>And I?</s>"
    expected = templated.tokenizer(text + "<assistant>", add_special_tokens=False)["input_ids"]
    assert tokens == expected and params.stop == ("!",)


def test_stream_starts_with_the_role(served):
    client = served.client()
    complete = client.chat.completions.create(model="fake", messages=CHAT, max_tokens=8, n=2)
    stream = client.chat.completions.create(
        model="fake", messages=CHAT, max_tokens=8, n=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    first, second, *chunks, end = list(stream)
    assert [c.choices[0].delta.role for c in (first, second)] == ["assistant"] * 2
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in complete.choices]
    assert end.usage == complete.usage
    assert sum(chunk.choices[0].finish_reason == "length" for chunk in chunks) == 2


def test_logprobs_of_a_chat(served, bundled_tokenizer):
    client = served.client()
    options = dict(model="fake", messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=2)
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(content) == 4
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -1 for entry in content)
    assert "".join(entry.token for entry in content).strip() == bundled_tokenizer.decode(
        bundled_tokenizer(PLAIN)["input_ids"][1:5]
    )
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_max_tokens_defaults_to_the_servers_limit(serve, make_fake):
    client = serve(make_fake(), max_new_tokens=12).client()
    answer = client.chat.completions.create(model="fake", messages=CHAT)
    assert answer.usage.completion_tokens == 12
    answer = client.chat.completions.create(model="fake", messages=CHAT, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_response_message_can_be_sent_back(served, fake):
    client = served.client()
    answer = client.chat.completions.create(model="fake", messages=CHAT[:2], max_tokens=3)
    back = [*CHAT[:2], answer.choices[0].message, {"role": "user", "content": "Go on."}]
    client.chat.completions.create(model="fake", messages=back, max_tokens=3)
    client.chat.completions.create(
        model="fake", messages=[message if isinstance(message, dict) else message.model_dump()
                                for message in back], max_tokens=3,
    )  # fmt: skip
    assert fake.requests[1][0] == fake.requests[2][0] != fake.requests[0][0]


def test_a_developer_message_is_a_system_message(served, fake):
    client = served.client()
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be kind."}, *CHAT[1:2]]
        client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    assert fake.requests[0][0] == fake.requests[1][0]


def test_stream_with_kept_tokens(served, fake, bundled_tokenizer):
    options = dict(model="fake", messages=CHAT, max_tokens=7)
    create = served.client().chat.completions.create
    stream = list(create(**options, stream=True, extra_body={"h2o": {"kept_every": 3}}))
    reports = [chunk.choices[0].h2o for chunk in stream if hasattr(chunk.choices[0], "h2o")]
    assert fake.requests[-1][2] is None  # no budget of its own
    prompt = fake.requests[-1][0]
    assert [len(report["kept"]) for report in reports] == [len(prompt) + step for step in (1, 4, 6)]
    assert (
        reports[-1]["num_heads"] == 4 and reports[-1]["full_bytes"] > reports[-1]["cache_bytes"] > 0
    )
    # Only new tokens are told again.
    tokens = [text for report in reports for text in report["tokens"]]
    assert len(tokens) == len(reports[-1]["kept"])
    assert "".join(tokens[1 : len(prompt)]).strip() == PLAIN
    complete = create(**options, extra_body={"h2o": {"kept_every": 3}}).choices[0].h2o
    assert complete["kept"] == reports[-1]["kept"] and complete["tokens"] == tokens
    assert not hasattr(create(**options).choices[0], "h2o")
    text = served.client().completions.create(
        model="fake", prompt="Grüße 🙂🙂", max_tokens=2, extra_body={"h2o": {"kept_every": 1}}
    )
    # The characters that are spread over several tokens are whole.
    assert "".join(text.choices[0].h2o["tokens"]).count("🙂") == 2


def test_thoughts_come_as_reasoning_content(calm, monkeypatch):
    deltas = [
        OutputDelta(0, "", (5, 6), reasoning="Let me ", reasoning_tokens=2),
        OutputDelta(0, "", (7,), reasoning="see.", reasoning_tokens=1),
        OutputDelta(0, "Yes", (8,)),
        OutputDelta(0, ".", (9,), finish_reason="stop"),
    ]

    async def generate(*_, **__):
        for delta in deltas:
            yield delta

    monkeypatch.setattr(calm.engine, "generate", generate)
    client = calm.client()
    request = {"model": "fake", "messages": CHAT, "stream_options": {"include_usage": True}}
    reply = client.chat.completions.create(**(request | {"stream_options": None}))
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Let me see.")
    assert reply.usage.completion_tokens_details.reasoning_tokens == 3
    *chunks, last = client.chat.completions.create(**request, stream=True)
    pieces = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    thoughts = [piece["reasoning_content"] for piece in pieces if "reasoning_content" in piece]
    assert thoughts == ["Let me ", "see."] and last.usage.completion_tokens == 5
    assert "".join(piece.get("content") or "" for piece in pieces) == "Yes."
    response = client.responses.create(model="fake", input="Why?")
    assert response.output_text == "Yes."
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    deltas[2:] = [OutputDelta(0, "", (8,), finish_reason="length", reasoning="M")]
    cut = client.chat.completions.create(**(request | {"stream_options": None})).choices[0]
    assert (cut.message.content, cut.message.reasoning_content) == ("", "Let me see.M")
