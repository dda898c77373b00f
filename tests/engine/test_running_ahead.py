"""Decode steps that are launched before the tokens of the one before are read."""

import pytest
from pretended_device import make_model, pretended_device

import h2okv
from h2okv.engine.engine import Engine
from h2okv.engine.outputs import RequestFailedError
from h2okv.integration.graphs import VARIABLE

CACHES = {
    "best": {"cache": "best:20%,every=prompt+8", "min_tokens": 0},
    "h2o": {"heavy": 0.2, "recent": 0.2, "min_tokens": 0},
    "spans, states": {"heavy": 10, "recent": 8, "evict_every": 8, "prefix_cache": 1 << 24},
}


@pytest.fixture
def steps_ahead(monkeypatch):
    """Let every engine run ahead; return the steps whose tokens it had not read, as a list."""
    steps, execute = [], Engine._read_behind

    def note(engine, unread):
        is_ahead = execute(engine, unread)
        steps.append(is_ahead)
        return is_ahead

    monkeypatch.setattr(Engine, "_read_behind", note)
    monkeypatch.setattr(Engine, "runs_ahead", True)
    return steps


def answers(llm, prompts, params):
    results = llm.generate(prompts, params, show_progress=False)
    return [
        (c.token_ids, c.text, c.finish_reason, c.logprobs) for r in results for c in r.completions
    ]


@pytest.mark.parametrize("name", CACHES)
def test_answers_are_those_of_an_engine_that_reads_first(
    make_llama, make_llm, make_prompts, steps_ahead, monkeypatch, name
):
    """Texts end by tokens, strings and lengths, while others wait for their slots."""
    model, prompts = make_llama(), make_prompts([30, 12, 25, 40, 18, 33, 21])
    sampling = h2okv.SamplingParams
    params = [
        sampling(max_tokens=30, temperature=0, ignore_eos=True),
        sampling(max_tokens=25, seed=3, n=2),
        sampling(max_tokens=17, temperature=0, stop_token_ids=tuple(range(3, 12))),
        sampling(max_tokens=22, seed=4, top_p=0.8, stop=("e",)),
        sampling(max_tokens=9, temperature=0, logprobs=2),
        sampling(max_tokens=20, seed=1, repetition_penalty=1.3),
        sampling(max_tokens=40, seed=6, temperature=0.7, stop_token_ids=tuple(range(40, 60))),
    ]
    # The order of steps must not depend on how long they take.
    options = {"max_num_seqs": 3, "max_prefill_time_fraction": 0.999999, **CACHES[name]}
    ahead = answers(make_llm(model, **options), prompts, params)
    assert steps_ahead.count(True) > 10
    monkeypatch.setattr(Engine, "runs_ahead", False)
    count = len(steps_ahead)
    assert answers(make_llm(model, **options), prompts, params) == ahead
    assert len(steps_ahead) == count
    assert {reason for _, _, reason, _ in ahead} == {"stop", "length"}


def test_a_next_turn_finds_the_states_of_the_answer(
    make_llama, make_llm, make_prompts, steps_ahead, greedy
):
    """A step that saves a state is not run ahead: its key needs the token."""
    (prompt,) = make_prompts([20])
    llm = make_llm(make_llama(), **CACHES["spans, states"])
    (first,) = llm.generate([prompt], greedy(30))
    text = [*prompt, *first.completions[0].token_ids]
    llm.generate([[*text, 5, 6]], greedy(3))
    assert steps_ahead.count(True) > 15
    assert llm.stats().reused_tokens == len(text) // 8 * 8


def test_a_client_that_leaves_and_an_error_in_a_step_that_runs_ahead(
    make_llama, make_llm, make_prompts, steps_ahead, greedy, monkeypatch
):
    prompts = make_prompts([10, 20])
    llm = make_llm(make_llama())
    (expected,) = llm.generate(prompts[1:], greedy(12))
    events = [[], []]
    requests = [
        llm.engine.request(prompt, greedy(12), received.append)
        for prompt, received in zip(prompts, events, strict=True)
    ]
    for request in requests:
        llm.engine.scheduler.submit(request)
    while not (steps_ahead and steps_ahead[-1] and llm.stats().running == 2):
        llm.engine.step()
    count = len(events[0])
    llm.engine.abort(requests[0])
    while llm.engine.has_clients:
        llm.engine.step()
    assert (len(events[0]), llm.stats().aborted) == (count, 1)
    assert requests[1].outputs[0].tokens == expected.completions[0].token_ids

    execute = llm.engine._execute

    def broken(step, newest=None):
        if newest is not None:
            raise RuntimeError("out of something")
        return execute(step)

    monkeypatch.setattr(llm.engine, "_execute", broken)
    with pytest.raises(RequestFailedError, match="out of something"):
        llm.generate(prompts[1:], greedy(12))
    monkeypatch.undo()
    assert llm.generate(prompts[1:], greedy(12)) == [expected]


def test_a_text_that_ends_frees_its_slots_while_its_sibling_goes_on(
    make_llama, make_llm, make_prompts, steps_ahead
):
    (prompt,) = make_prompts([20])
    llm = make_llm(make_llama())
    (both,) = llm.generate([prompt], h2okv.SamplingParams(max_tokens=30, n=2, seed=5))
    first, second = (completion.token_ids for completion in both.completions)
    stop = next(token for token in first[5:15] if token not in second)
    params = h2okv.SamplingParams(max_tokens=30, n=2, seed=5, stop_token_ids=(stop,))
    request = llm.engine.request(prompt, params, lambda event: None)
    llm.engine.scheduler.submit(request)
    while not (request.outputs and request.outputs[0].is_finished):
        llm.engine.step()
    llm.engine.step()
    llm.engine.step()
    assert llm.stats().running == 1 and not request.is_over


def prompt_of(length):
    return [(7 * i + length) % 90 + 3 for i in range(length)]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_step_on_a_gpu_waits_for_nothing_but_the_tokens_before(
    monkeypatch, tokenizer, temperature
):
    """A copy that is read before its event is reached has other numbers on the pretended device."""
    pytest.importorskip("triton")
    params = h2okv.SamplingParams(
        max_tokens=24, ignore_eos=True, temperature=temperature, seed=1 if temperature else None
    )
    prompts = [prompt_of(length) for length in (20, 31)]
    monkeypatch.setenv(VARIABLE, "auto")
    model = make_model(attention="sdpa", eos_token_id=None)
    with pretended_device(monkeypatch, runs_kernels=True) as device:
        monkeypatch.setenv("H2OKV_OPS", "plain")
        with h2okv.LLM(
            device.to(model), tokenizer, prefix_cache=0, heavy=8, recent=6, evict_every=64
        ) as llm:
            expected = [r.completions[0].token_ids for r in llm.generate(prompts, params)]
            requests = [llm.engine.request(p, params, lambda event: None) for p in prompts]
            llm.engine.scheduler.waiting.extend(requests)
            while not all(r.outputs and len(r.outputs[0].tokens) >= 8 for r in requests):
                llm.engine.step()
            with device.count() as counts:
                for number in range(6):
                    before = [len(request.outputs[0].tokens) for request in requests]
                    llm.engine.step()
                    after = [len(request.outputs[0].tokens) for request in requests]
                    assert after == [count + 1 for count in before], number
            assert counts.num_waits == 0, str(counts)
            assert counts.hazards.total() >= 6  # the tokens of each step come to the host
            while llm.engine.scheduler.has_work:
                llm.engine.step()
            assert [request.outputs[0].tokens for request in requests] == expected


@pytest.fixture
def counted(monkeypatch, tokenizer):
    """Return a function that counts what an engine does on a GPU, with models of two depths."""
    pytest.importorskip("triton")
    options = {"heavy": 8, "recent": 6, "sink": 2, "scoring": "expected", "evict_every": 16}
    options |= {"prefix_cache": 0, "max_num_seqs": 2}

    def measure(prepare, act, **factors):
        measured = []
        for layers in (1, 4):
            budgets = {name: value * layers for name, value in factors.items()}
            with monkeypatch.context() as patch, pretended_device(patch) as device:
                model = device.to(make_model(layers=layers, attention="sdpa", eos_token_id=None))
                with h2okv.LLM(model, tokenizer, **options, **budgets) as llm:
                    prepare(llm)
                    with device.count() as counts:
                        act(llm)
            measured.append(counts)
        return measured

    return measure


def test_a_release_launches_as_often_for_all_layers_as_for_one(counted, greedy):
    """The last sequence moves into the released rows: a copy for each data type."""

    def fill(llm):
        for length in (40, 30):
            request = llm.engine.request(prompt_of(length), greedy(9), lambda event: None)
            llm.engine.scheduler.submit(request)
        while llm.stats().running < 2:
            llm.engine.step()

    few, many = counted(fill, lambda llm: llm.engine.runner.pool.release(0))
    assert few.num_waits == many.num_waits == 0, str(many)
    assert few.num_launches == many.num_launches <= 6


def test_a_request_waits_as_often_as_one_of_a_single_layer(counted, greedy):
    """The host reads once each: whether attention is finite, entries, the first token."""
    few, many = counted(
        lambda llm: llm.generate([prompt_of(40)], greedy(9)),  # and a step is recorded
        lambda llm: llm.generate([prompt_of(40)], greedy(4)),
        layer_budgets=[[1.2, 0.8]],
    )
    assert few.num_waits == many.num_waits <= 3, str(many)
