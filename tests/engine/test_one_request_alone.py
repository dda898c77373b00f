"""Whatever one request asks for, or meets, the others get their tokens and the engine goes on."""

import asyncio
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

import h2okv
from h2okv.engine import engine as core
from h2okv.engine.model_runner import ModelRunner
from h2okv.engine.outputs import RequestFailedError
from h2okv.engine.request import Output
from h2okv.engine.sampler import Sampler, sample

OTHERS = (
    h2okv.SamplingParams(max_tokens=8, temperature=0),
    h2okv.SamplingParams(max_tokens=8, seed=3),
    h2okv.SamplingParams(max_tokens=8, seed=4, repetition_penalty=1.5),
)
MARK, MARKED = 91, h2okv.SamplingParams(max_tokens=6, seed=13, repetition_penalty=1.5)

ODD = st.sampled_from(
    [None, True, "1", "", (), {}, 0, -1, 2, 2**63, 10**400, 0.0, 0.5, 2.5, 1e-45, 1e-40, 1e-38,
     1e-5, 1e5, 1e38, math.inf, -math.inf, math.nan, (5,), {"5": 3}, {-1: 2.0}, {5: math.nan}]
)  # fmt: skip
TOKENS = st.integers(0, 96)
FITTING = {
    "temperature": st.floats(0, 100) | st.sampled_from([0, 1, 2, 1e-40, 1e-5]),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(0, 2**63 - 1),
    "repetition_penalty": st.floats(1e-3, 1e6) | st.integers(1, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100) | st.integers(-100, 100)),
    "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=3),
    "stop_token_ids": st.lists(TOKENS, max_size=3),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 3),
    "seed": st.integers(),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
}
WISHES = st.builds(
    lambda fitting, odd: fitting | odd,
    st.fixed_dictionaries({"max_tokens": st.sampled_from([0, 1, 5])}, optional=FITTING),
    st.dictionaries(st.sampled_from(["max_tokens", *FITTING]), ODD, max_size=1),
)


@pytest.fixture(scope="module")
def prompts(make_prompts):
    return [
        [token for token in prompt if token != MARK] for prompt in make_prompts([20, 31, 26, 24])
    ]


@pytest.fixture(scope="module")
def llm(make_llama, tokenizer):
    # One end token, so that there is something to ignore.
    model = make_llama()
    model.generation_config.eos_token_id = 96
    with h2okv.LLM(model, tokenizer, heavy=0.2, recent=0.2, min_tokens=0, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(llm, prompts):
    """Return the tokens of the other requests, each generated alone."""
    pairs = zip(prompts, OTHERS, strict=False)
    return [llm.generate([prompt], params)[0].completions[0].token_ids for prompt, params in pairs]


@settings(max_examples=examples(40), deadline=None)
@given(wishes=st.lists(WISHES, min_size=1, max_size=3))
def test_any_parameters_leave_other_requests_unchanged(llm, prompts, expected, wishes):
    scheduler, events = llm.engine.scheduler, []
    others = [
        llm.engine.request(prompt, params, lambda event: None)
        for prompt, params in zip(prompts, OTHERS, strict=False)
    ]
    scheduler.waiting.append(others[0])
    for options in wishes:
        request_events = []
        try:
            params = h2okv.SamplingParams(**options)
            # Without max_tokens it would continue to the end of the context.
            if params.max_tokens is None:
                continue
            scheduler.waiting.append(llm.engine.request(prompts[3], params, request_events.append))
        except ValueError as error:
            assert str(error).startswith(tuple(options)), error
            continue
        events.append(request_events)
    for request in others[1:]:
        scheduler.waiting.append(request)
    while scheduler.has_work:
        llm.engine.step()
    assert [request.outputs[0].tokens for request in others] == expected
    assert all(
        received[-1] is None or isinstance(received[-1], RequestFailedError) for received in events
    )
    assert llm.stats().running == 0


def broken_sampler(monkeypatch):
    def make(model, params, *args):
        if params is MARKED:
            raise TypeError("nothing to sample with")
        return Sampler(model, params, *args)

    monkeypatch.setattr(core, "Sampler", make)


def broken_processor(monkeypatch):
    process = Sampler.processed

    def broken(sampler, logits, text):
        if sampler.params is MARKED:
            raise IndexError("no such token")
        return process(sampler, logits, text)

    monkeypatch.setattr(Sampler, "processed", broken)


def non_finite_weights(monkeypatch):
    process = Sampler.processed

    def broken(sampler, logits, text):
        processed = process(sampler, logits, text)
        return processed / 0.0 if sampler.params is MARKED else processed

    monkeypatch.setattr(Sampler, "processed", broken)


def broken_text(monkeypatch):
    take = Output.append

    def broken(output, *args):
        if output.request.params is MARKED and len(output.tokens) == 2:
            raise UnicodeError("half a character")
        return take(output, *args)

    monkeypatch.setattr(Output, "append", broken)


def no_memory_for_the_prompt(monkeypatch):
    prefill = ModelRunner._prefill

    def broken(runner, chunks, *args):
        if any(MARK in chunk.tokens for chunk in chunks):
            raise torch.OutOfMemoryError("no memory")
        return prefill(runner, chunks, *args)

    monkeypatch.setattr(ModelRunner, "_prefill", broken)


@pytest.mark.parametrize(
    "fault",
    [broken_sampler, broken_processor, non_finite_weights, broken_text, no_memory_for_the_prompt],
)
def test_error_in_one_request_leaves_the_others_unchanged(
    make_llama, tokenizer, prompts, expected, monkeypatch, fault
):
    model = make_llama()
    model.generation_config.eos_token_id = 96
    served = h2okv.AsyncLLM(model, tokenizer, heavy=0.2, recent=0.2, min_tokens=0, max_num_seqs=4)
    fault(monkeypatch)

    async def tokens(prompt, params):
        return [
            token async for piece in served.generate(prompt, params) for token in piece.token_ids
        ]

    async def main():
        calls = list(zip(prompts, OTHERS, strict=False))
        calls.insert(1, ([*prompts[3], MARK, 5], MARKED))
        results = await asyncio.gather(*(tokens(*call) for call in calls), return_exceptions=True)
        assert served.is_healthy
        afterwards = await tokens(prompts[0], OTHERS[0])
        await served.aclose()
        return results, afterwards

    (first, failed, *later), afterwards = asyncio.run(main())
    stats = served.stats()
    assert isinstance(failed, RequestFailedError)
    assert [first, *later] == expected and afterwards == expected[0]
    assert (stats.failed, stats.finished, stats.running) == (1, 4, 0)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_sequence_with_invalid_logits_leaves_the_others_unchanged(make_llama, value, options):
    model, generator = make_llama(), torch.Generator().manual_seed(0)
    logits = torch.randn(3, 97, generator=generator)
    logits[1, 40:] = value
    if value == -math.inf:
        logits[1] = value
    params = h2okv.SamplingParams(seed=5, **options)

    def samplers():
        return [Sampler(model, params, (5, 6), index) for index in range(3)]

    first, broken, last = sample(samplers(), [[]] * 3, logits)
    assert isinstance(broken, RequestFailedError)
    apart = samplers()
    assert [first] == sample(apart[:1], [[]], logits[:1])
    assert [last] == sample(apart[2:], [[]], logits[2:])
