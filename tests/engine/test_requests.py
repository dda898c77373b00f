"""Parameters of requests, and errors that affect a single one."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import h2okv
from h2okv.engine.outputs import OutputDelta, QueueFullError, RequestFailedError
from h2okv.engine.request import Output
from h2okv.engine.sampler import Sampler, sample
from h2okv.prompts.readers import PromptTooLongError


def run(llm):
    while llm.engine.scheduler.has_work:
        llm.engine.step()


def submit(llm, prompt, params, budget=None):
    events = []
    request = llm.engine.request(prompt, params, events.append, budget)
    llm.engine.scheduler.submit(request)
    return request, events


def test_a_model_with_weights_on_a_disk_draws_on_the_cpu(make_llama):
    """Such weights are on the meta device, which has no random numbers."""
    params = h2okv.SamplingParams(seed=7)
    sampler = Sampler(make_llama().to("meta"), params, [3, 4])
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(7)
    expected = [
        int(torch.multinomial(logits.softmax(-1)[0], 1, generator=generator)) for _ in range(5)
    ]
    assert [sample([sampler], [[]], logits)[0] for _ in range(5)] == expected


def test_several_outputs_share_one_prefill(make_llama, make_llm, make_prompts):
    model = make_llama()
    (prompt,) = make_prompts([30])
    params = h2okv.SamplingParams(max_tokens=12, n=3, seed=5)
    llm = make_llm(model)
    (together,) = llm.generate([prompt], params)
    apart = [
        llm.generate([prompt], h2okv.SamplingParams(max_tokens=12, seed=5 + index))[0]
        for index in range(3)
    ]
    texts = [completion.token_ids for completion in together.completions]
    assert texts == [output.completions[0].token_ids for output in apart]
    assert len({tuple(tokens) for tokens in texts}) == 3
    assert llm.stats().prompt_tokens == 4 * 30


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.4}], ids=str
)
def test_sampled_tokens_equal_generate(make_llama, make_llm, make_prompts, options):
    model = make_llama()
    prompts = make_prompts([20, 30, 25])
    llm = make_llm(model)
    params = [
        h2okv.SamplingParams(max_tokens=15, ignore_eos=True, seed=seed, **options)
        for seed in range(3)
    ]
    generated = [output.completions[0].token_ids for output in llm.generate(prompts, params)]
    llm.close()
    with h2okv.enable(model):
        for seed, prompt in enumerate(prompts):
            torch.manual_seed(seed)
            settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | options
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=h2okv.H2OCache(model.config, 0.2, 0.2, min_tokens=0),
                max_new_tokens=15,
                do_sample=True,
                **settings,
            )
            assert generated[seed] == expected[0, len(prompt) :].tolist()


def test_penalties_and_logit_bias(make_llama, make_llm, make_prompts, greedy):
    (prompt,) = make_prompts([20])
    llm = make_llm(make_llama())
    plain, biased, never_twice, penalised = (
        output.completions[0].token_ids
        for output in llm.generate(
            [prompt] * 4,
            [
                greedy(10),
                greedy(10, logit_bias={42: 100}),
                greedy(10, presence_penalty=2.0, logit_bias={7: 60.0, 8: 59.0, 9: 58.0}),
                greedy(10, repetition_penalty=1e6),
            ],
        )
    )
    assert set(biased) == {42}
    assert plain != biased
    # 7 leads by 1 and costs 2 once it is there, 8 likewise; then 7 leads again.
    assert never_twice[:2] == [7, 8]
    assert not set(penalised) & set(prompt)
    assert len(set(penalised)) == len(penalised)


def test_a_penalty_of_the_models_authors_can_be_undone(make_llama, make_llm, make_prompts, greedy):
    (prompt,) = make_prompts([20])
    model = make_llama()
    (expected,) = make_llm(model).generate([prompt], greedy(10))
    model.generation_config.repetition_penalty = 1e6
    llm = make_llm(model)
    (output,) = llm.generate([prompt], greedy(10, repetition_penalty=1))
    assert output.completions[0].token_ids == expected.completions[0].token_ids


def test_logprobs_equal_the_model(make_llama, make_llm, make_prompts, greedy):
    model = make_llama()
    (prompt,) = make_prompts([20])
    llm = make_llm(model, max_prefill_tokens=6, heavy=1.0, recent=0.0)
    params = greedy(1, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate([prompt], params)
    llm.close()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
    logprobs = output.prompt.logprobs
    assert logprobs[0] is None
    for position, logprob in enumerate(logprobs[1:], start=1):
        assert logprob.token == prompt[position]
        assert logprob.logprob == pytest.approx(
            float(expected[position - 1, prompt[position]]), abs=1e-4
        )
        values, indices = expected[position - 1].topk(2)
        assert [token for token, _ in logprob.top] == indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(values.tolist(), abs=1e-4)
    (new,) = output.completions[0].logprobs
    assert new.logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)
    assert len(new.top) == 3


def test_max_tokens_zero_takes_no_slots(make_llama, make_llm, make_prompts, greedy):
    (prompt,) = make_prompts([20])
    llm = make_llm(make_llama(), max_num_seqs=1)
    (output,) = llm.generate([prompt], greedy(0, prompt_logprobs=0))
    assert len(output.prompt.logprobs) == 20
    assert output.completions[0].token_ids == []
    assert llm.stats().steps == 0


def test_stop_texts_and_tokens(make_llama, make_llm, make_prompts, greedy, tokenizer):
    (prompt,) = make_prompts([20])
    llm = make_llm(make_llama())
    (plain,) = llm.generate([prompt], greedy(20))
    unstopped = plain.completions[0]
    assert unstopped.finish_reason == "length"
    stop = unstopped.text[8:10]
    (stopped,) = llm.generate([prompt], greedy(20, stop=(stop,)))
    assert stopped.text == unstopped.text[: unstopped.text.find(stop)]
    assert (stopped.completions[0].finish_reason, stopped.completions[0].stop_reason) == (
        "stop",
        stop,
    )
    token = unstopped.token_ids[3]
    (ended,) = llm.generate([prompt], greedy(20, stop_token_ids=(token,)))
    assert (
        ended.completions[0].token_ids
        == unstopped.token_ids[: unstopped.token_ids.index(token) + 1]
    )
    assert ended.completions[0].stop_reason == token


def test_eos_token_ends_a_text_unless_ignored(make_llama, make_llm, make_prompts, greedy):
    model = make_llama()
    (prompt,) = make_prompts([20])
    llm = make_llm(model)
    (plain,) = llm.generate([prompt], greedy(20))
    llm.close()
    model.generation_config.eos_token_id = plain.completions[0].token_ids[5]
    llm = make_llm(model)
    params = h2okv.SamplingParams(max_tokens=20, temperature=0)
    ended, ignored = (
        output.completions[0] for output in llm.generate([prompt] * 2, [params, greedy(20)])
    )
    assert ended.finish_reason == "stop"
    assert len(ended.token_ids) <= 6
    assert len(ignored.token_ids) == 20


def test_text_ends_at_the_context_limit(make_llama, make_llm, make_prompts):
    (prompt,) = make_prompts([500])
    llm = make_llm(make_llama())
    (output,) = llm.generate([prompt], h2okv.SamplingParams(temperature=0))
    assert len(output.completions[0].token_ids) == 12
    assert output.completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "budget", "error", "message"),
    [
        ([], {}, None, ValueError, "no tokens"),
        ([5] * 512, {}, None, PromptTooLongError, "context of 512 tokens, got 512 and 1"),
        ([5, 97], {}, None, ValueError, "token must be 0 to 96 for this model, got 97"),
        ([5, -1], {}, None, ValueError, "got -1"),
        ([5, True], {}, None, ValueError, "got True"),
        ([5, 6.0], {}, None, ValueError, "got 6.0"),
        ("\ud800", {}, None, ValueError, "prompt cannot be read"),
        (5, {}, None, ValueError, "prompt cannot be read"),
        ([5], {"logit_bias": {97: 1}}, None, ValueError, "logit_bias: token must be 0 to 96"),
        ([5], {"n": 4}, None, ValueError, "n=4 is more than max_num_seqs=3"),
        ([5], {}, h2okv.Budget(300, 1), ValueError, "budget of 301 entries is larger than the 204"),
    ],
)
def test_invalid_requests_raise_before_submission(
    make_llama, make_llm, prompt, params, budget, error, message
):
    llm = make_llm(make_llama())
    with pytest.raises(error, match=message):
        submit(llm, prompt, h2okv.SamplingParams(**params), budget)
    assert not llm.engine.scheduler.has_work


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0),
        ("top_p", 1.5), ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0), ("n", 0),
        ("presence_penalty", 3), ("logprobs", 21), ("stop", ("",)), ("logit_bias", {1: 101}),
        ("max_tokens", 2.5), ("max_tokens", True), ("max_tokens", 10**5000), ("temperature", "1"),
        ("temperature", None), ("temperature", 10**400), ("top_k", 2.5), ("top_k", None),
        ("n", 1.5), ("seed", 1.5), ("logprobs", True), ("repetition_penalty", 1e-38),
        ("repetition_penalty", 1e38), ("stop", (5,)), ("stop", 5), ("stop", None),
        ("stop_token_ids", 5), ("stop_token_ids", ("5",)), ("stop_token_ids", (-1,)),
        ("logit_bias", {"x": 3}), ("logit_bias", {-1: 3}), ("logit_bias", {5: "3"}),
        ("logit_bias", {10**5000: 3}), ("logit_bias", [5]), ("ignore_eos", "yes"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_sampling_parameters_out_of_range_raise(field, value):
    with pytest.raises(ValueError, match=field):
        h2okv.SamplingParams(**{field: value})


def test_integers_and_lists_are_converted(make_llama, make_llm, make_prompts):
    params = h2okv.SamplingParams(
        max_tokens=4, temperature=2, top_p=1, min_p=0, repetition_penalty=2, presence_penalty=1,
        logit_bias={5: 3}, stop=["a text"], stop_token_ids=[7],
    )  # fmt: skip
    assert (params.stop, params.stop_token_ids) == (("a text",), (7,))
    numbers = (params.temperature, params.top_p, params.repetition_penalty, params.logit_bias[5])
    assert all(type(number) is float for number in numbers)
    assert dataclasses.replace(params) == params
    (output,) = make_llm(make_llama()).generate(make_prompts([20]), params)
    assert output.completions[0].token_ids


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, 9e-6])
def test_tiny_temperature_is_greedy(temperature):
    params = h2okv.SamplingParams(temperature=temperature)
    assert params.is_greedy and params.temperature == 0
    assert not h2okv.SamplingParams(temperature=1e-5).is_greedy


def test_full_queue_raises_with_retry_after(make_llama, make_llm, make_prompts, greedy):
    prompts = make_prompts([10] * 5)
    llm = make_llm(make_llama(), max_num_seqs=1, max_waiting=2)
    submit(llm, prompts[0], greedy(5))
    llm.engine.step()
    submit(llm, prompts[1], greedy(5))
    submit(llm, prompts[2], greedy(5))
    with pytest.raises(QueueFullError) as refused:
        submit(llm, prompts[3], greedy(5))
    assert refused.value.retry_after >= 1
    run(llm)
    submit(llm, prompts[4], greedy(5))
    run(llm)
    assert llm.stats().finished == 4


def test_requests_that_find_slots_do_not_wait(make_llama, make_llm, make_prompts, greedy):
    """Also those that come before the engine has made a step."""
    prompts = make_prompts([10] * 4)
    llm = make_llm(make_llama(), max_num_seqs=2, max_waiting=1)
    for prompt in prompts[:3]:
        submit(llm, prompt, greedy(5))
    with pytest.raises(QueueFullError):
        submit(llm, prompts[3], greedy(5))
    run(llm)
    assert llm.stats().finished == 3


def test_abort_frees_slots_within_a_step(make_llama, make_llm, make_prompts, greedy):
    prompts = make_prompts([10, 20, 200, 15])
    model = make_llama()
    llm = make_llm(model, max_prefill_tokens=50, max_prefill_time_fraction=0.99)
    first, _ = submit(llm, prompts[0], greedy(50))
    second, events = submit(llm, prompts[1], greedy(50))
    while llm.stats().running < 2:
        llm.engine.step()
    third, _ = submit(llm, prompts[2], greedy(50))
    waiting, _ = submit(llm, prompts[3], greedy(50))
    llm.engine.abort(waiting)
    while not 0 < third.num_prefilled < 200:
        llm.engine.step()
    before = len(events)
    llm.engine.abort(third)
    llm.engine.abort(first)
    llm.engine.step()
    assert llm.stats().running == 1
    assert len(events) == before + 1
    run(llm)
    assert llm.stats().aborted == 3
    assert sum(len(event.token_ids) for event in events if isinstance(event, OutputDelta)) == 50


def test_nan_fails_only_its_own_request(make_llama, make_llm, make_prompts, greedy, alone):
    """Break the embedding of a token: it fails in a prompt, and as a new token."""
    model = make_llama()
    prompts = make_prompts([20, 30, 25])
    expected = [alone(model, prompt, 12) for prompt in prompts]
    poison = 2  # in none of the prompts
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    assert all(poison not in tokens for tokens in [*prompts, *expected])
    llm = make_llm(model)
    good = [submit(llm, prompt, greedy(12))[0] for prompt in prompts[:2]]
    _, in_prompt = submit(llm, [*prompts[2], poison, 5], greedy(12))
    _, while_decoding = submit(llm, prompts[2], greedy(12, logit_bias={poison: 100.0}))
    last = submit(llm, prompts[2], greedy(12))[0]
    run(llm)
    assert [request.outputs[0].tokens for request in [*good, last]] == expected
    for events in (in_prompt, while_decoding):
        assert isinstance(events[-1], RequestFailedError)
    assert llm.stats().failed == 2
    assert llm.stats().finished == 3


def test_failed_prompt_leaves_other_outputs_available(make_llama, make_llm, make_prompts, greedy):
    model = make_llama()
    prompts = make_prompts([20, 30, 25, 22])
    llm = make_llm(model)
    expected = llm.generate([prompts[0], *prompts[2:]], greedy(12))
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = torch.nan
    with pytest.raises(RequestFailedError, match="not finite") as failed:
        llm.generate([prompts[0], [*prompts[1], 2, 5], *prompts[2:]], greedy(12))
    assert failed.value.outputs == [expected[0], None, *expected[1:]]
    assert llm.generate(prompts[:1], greedy(12)) == expected[:1]


def test_short_prompts_are_prefilled_together(make_llama, make_llm, make_prompts, greedy, alone):
    model = make_llama()
    prompts = make_prompts([20, 3, 17, 20, 30, 9])
    llm = make_llm(model, max_num_seqs=4, max_prefill_tokens=60)
    read = []
    execute = llm.engine._execute
    llm.engine._execute = lambda step: read.append(len(step.prefill)) or execute(step)
    events = [submit(llm, prompt, greedy(8))[1] for prompt in prompts[:5]]
    own_budget = submit(llm, prompts[5], greedy(8), h2okv.Budget(3, 2))[1]
    run(llm)
    generated = [[t for e in received if e is not None for t in e.token_ids] for received in events]
    assert generated == [alone(model, prompt, 8) for prompt in prompts[:5]]
    assert len([e for e in own_budget if e is not None]) == 8
    # 3 x 20 fill a chunk; then one of 20 for the only free row; the last two wait for a row.
    assert [count for count in read if count] == [3, 1, 1, 1]
    evicted = sum(length - max(2 * int(0.2 * length), 2) for length in (20, 3, 17, 20, 30))
    assert llm.stats().evictions >= evicted * 4


def test_engine_works_after_ctrl_c_in_a_step(
    make_llama, make_llm, make_prompts, greedy, alone, monkeypatch
):
    model = make_llama()
    prompts = make_prompts([20, 30])
    llm = make_llm(model)
    attention = model.model.layers[1].self_attn
    forward, calls = attention.forward, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:  # the first layer has taken its step, this one has not
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(12))
    outputs = llm.generate(prompts, greedy(12))
    assert llm.stats().running == 0
    llm.close()
    monkeypatch.undo()
    generated = [output.completions[0].token_ids for output in outputs]
    assert generated == [alone(model, prompt, 12) for prompt in prompts]


def test_threads_take_turns(make_llama, make_llm, make_prompts, greedy, alone):
    model = make_llama()
    prompts = make_prompts([20, 30, 25, 15])
    llm = make_llm(model)
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda prompt: llm.generate([prompt], greedy(20))[0], prompts))
    llm.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.completions[0].token_ids == alone(model, prompt, 20)


def test_characters_of_several_tokens_are_not_split(make_llama, make_llm, tokenizer):
    """Check that the pieces join to the text, and that none ends within a character."""
    token_ids = tokenizer("déjà vu, “naïve” 你好", add_special_tokens=False)["input_ids"]
    model = make_llama()
    llm = make_llm(model)
    params = h2okv.SamplingParams(max_tokens=len(token_ids))
    request = llm.engine.request([5, 6], params, lambda event: None)
    sampler = Sampler(model, params, request.prompt, 0)
    output = Output(request, 0, sampler, tokenizer)
    pieces = [output.append(token, frozenset(), ()) for token in token_ids]
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert pieces[-1].finish_reason == "length"
