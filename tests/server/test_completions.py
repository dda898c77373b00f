import openai
import pytest

from h2okv.budget import Budget

PROMPT = "It was a bright morning, and the"


@pytest.fixture
def ids(bundled_tokenizer):
    return bundled_tokenizer(PROMPT)["input_ids"]


@pytest.fixture
def text_after(bundled_tokenizer, ids):
    """Return a function of the text that the fake engine writes after the prompt."""

    def after(tokens: int) -> str:
        repeated = (ids * 10)[1 : 1 + tokens]
        return "".join(bundled_tokenizer.decode([token]) for token in repeated)

    return after


def test_completion_and_its_usage(served, ids, text_after):
    answer = served.client().completions.create(model="fake", prompt=PROMPT, max_tokens=5)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == [text_after(5)]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == len(ids) + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_max_tokens_defaults_to_sixteen(served, fake):
    served.client().completions.create(model="fake", prompt=PROMPT)
    assert fake.requests[0][1].max_tokens == 16


def test_streamed_text_equals_completion_and_ends_with_usage(served, ids, text_after):
    stream = served.client().completions.create(
        model="fake", prompt=PROMPT, max_tokens=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_after(5)
    assert len(chunks) == 5 and all(chunk.usage is None for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 5
    assert last.usage.prompt_tokens == len(ids)


def test_all_four_types_of_prompts(served, fake, ids, bundled_tokenizer):
    client = served.client()
    other = bundled_tokenizer("A second prompt")["input_ids"]
    for prompt, read in (
        (PROMPT, [ids]),
        ([PROMPT, "A second prompt"], [ids, other]),
        (other, [other]),
        ([other, ids[1:]], [other, ids[1:]]),
    ):
        fake.requests.clear()
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2)
        assert sorted(list(tokens) for tokens, _, _ in fake.requests) == sorted(read)
        expected = [
            "".join(map(bundled_tokenizer.decode, ([t] for t in prompt_ids[1:3])))
            for prompt_ids in read
        ]
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(read)))
        assert answer.usage.prompt_tokens == sum(map(len, read))


def test_several_prompts_and_outputs_in_one_stream(served, bundled_tokenizer):
    stream = served.client().completions.create(
        model="fake", prompt=[PROMPT, "the other text"], n=2, max_tokens=3, stream=True
    )
    texts, ends = ["", "", "", ""], 0
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        assert "usage" not in chunk.model_fields_set
        ends += choice.finish_reason == "length"
    assert texts[0] == texts[1] and texts[2] == texts[3] == "the other text"[: len(texts[2])]
    assert texts[0] != texts[2] and ends == 4


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_echo_with_logprobs_of_every_token(served, ids, text_after, streams):
    answer = served.client().completions.create(
        model="fake", prompt=PROMPT, max_tokens=1, echo=True, logprobs=2, stream=streams
    )
    choices = [chunk.choices[0] for chunk in answer] if streams else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    assert text == PROMPT + text_after(1)
    columns = {
        name: sum((getattr(choice.logprobs, name) for choice in choices), [])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert {len(column) for column in columns.values()} == {len(ids) + 1}
    assert columns["token_logprobs"] == [None] + [-1.0] * len(ids)
    assert columns["top_logprobs"][0] is None and len(columns["top_logprobs"][1]) == 2
    assert columns["tokens"][0] == "<|bos|>" and "".join(columns["tokens"][1:]) == text
    for token, offset in zip(columns["tokens"][1:], columns["text_offset"][1:], strict=True):
        assert text[offset : offset + len(token)] == token


def test_echo_of_a_prompt_of_tokens(served, ids, bundled_tokenizer):
    answer = served.client().completions.create(
        model="fake", prompt=ids, max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == bundled_tokenizer.decode(ids)
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == len(ids)
    assert answer.choices[0].logprobs.top_logprobs[1] == {"It": -1.0}


def test_partial_characters_are_returned_as_bytes(served, bundled_tokenizer):
    ids = bundled_tokenizer("a 雪", add_special_tokens=False)["input_ids"]
    answer = served.client().completions.create(
        model="fake", prompt=ids, max_tokens=0, echo=True, logprobs=0
    )
    tokens = answer.choices[0].logprobs.tokens
    byte_texts = [token.removeprefix("bytes:") for token in tokens if token.startswith("bytes:")]
    assert "".join(byte_texts).endswith("\\xe9\\x9b\\xaa") and len(byte_texts) > 1


def test_parameters_reach_the_engine(served, fake):
    served.client().completions.create(
        model="fake", prompt=PROMPT, max_tokens=3, temperature=0.5, top_p=0.9, n=2, seed=7,
        stop=["END", "\n\n"], presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"5": -100, "6": 2.5}, logprobs=3, best_of=1, user="somebody",
        extra_body={
            "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True,
            "stop_token_ids": [3, 4], "h2o": {"cache": "30+10%,sink=2"},
        },
    )  # fmt: skip
    _, params, budget = fake.requests[0]
    assert (params.max_tokens, params.n, params.seed, params.logprobs) == (3, 2, 7, 3)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert params.stop == ("END", "\n\n") and params.stop_token_ids == (3, 4) and params.ignore_eos
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.repetition_penalty == 1.2 and params.logit_bias == {5: -100, 6: 2.5}
    assert budget == Budget(30, 0.1, 2)


def test_models(served):
    client = served.client()
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "h2okv"
    with pytest.raises(openai.NotFoundError, match="model='gpt' is not served here; give 'fake'"):
        client.models.retrieve("gpt")


def test_sampling_defaults_come_from_the_model(served, fake, monkeypatch):
    sampling = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
    monkeypatch.setattr(fake, "model_sampling", sampling)
    create = served.client().completions.create
    create(model="fake", prompt="a b", max_tokens=1)
    params = fake.requests[-1][1]
    assert {name: getattr(params, name) for name in sampling} == sampling
    create(model="fake", prompt="a b", max_tokens=1, temperature=0, top_p=0.5)
    params = fake.requests[-1][1]
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0, 0.5, 1.1)
