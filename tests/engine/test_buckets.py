"""One CUDA graph for several numbers of sequences, on the pretended device."""

import copy

import pytest
import torch
from pretended_device import make_model, pretended_device

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.cache.h2o_cache import H2OCache
from h2okv.engine.engine import Engine
from h2okv.integration import prompt_chunks
from h2okv.integration.graphs import VARIABLE, DecodeGraphs, rows_for
from h2okv.ops import dispatch

pytest.importorskip("triton")

LAYERS = 2
BUDGET = {"heavy": 8, "recent": 6}
BY_HEAD = BUDGET | {"sink": 2, "scoring": "expected", "layer_budgets": [[1.2, 0.8]] * LAYERS}
OPTIONS = {
    "h2o": BUDGET,
    "best by head": BY_HEAD | {"evict_every": None},
    "best by head, spans": BY_HEAD | {"evict_every": 7},
    "best, whole prompts": BY_HEAD | {"evict_every": "prompt+7"},
    "spans": BUDGET | {"evict_every": 5},
    "8 bits": BUDGET | {"kv_bits": 8},
    "rolling": BUDGET | {"positions": "rolling"},
    "decay": BUDGET | {"scoring": "decay"},
    "budgets that differ": {"heavy": 0.3, "recent": 0.2, "min_tokens": 0},
}
FAST = {"h2o", "best by head, spans"}
BUCKETS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def test_buckets_are_powers_of_two_and_the_middles_between():
    for count in range(1, 129):
        expected = min(bucket for bucket in BUCKETS if bucket >= count)
        assert rows_for(count, 1000) == expected
        assert rows_for(count, count) == rows_for(count, 0) == count
        assert rows_for(count, 20) == (max(count, 20) if expected > 20 else expected)


def prompt(length):
    return [(7 * i + 3 * length) % 90 + 3 for i in range(length)]


# Some stay while others end, which leaves gaps that later ones fill.
NEW_TOKENS = [*range(56, 44, -2), *(9 + 3 * (5 * i % 14) for i in range(14)), *[4, 9, 14, 6, 11, 3]]
REQUESTS = [(prompt(20 + 3 * (i % 11)), new) for i, new in enumerate(NEW_TOKENS)]


@pytest.fixture
def cuts(monkeypatch):
    """Return of each cut that the host did after a step whether it was recorded or may be."""
    plain, calls = H2OCache.cut, []

    def cut(cache, ended, numbers=None, stores=True):
        calls.append(numbers is not None)
        return plain(cache, ended, numbers, stores)

    monkeypatch.setattr(H2OCache, "cut", cut)
    return calls


@pytest.fixture
def device(monkeypatch):
    with pretended_device(monkeypatch, runs_kernels=True) as device:
        yield device


@pytest.fixture
def records(monkeypatch):
    """Return the rows of each step that is recorded, as a list."""
    numbers, record = [], DecodeGraphs._record

    def note(graphs, work, cache):
        numbers.extend(len(ids) for name, ids in work.inputs.items() if name == "input_ids")
        return record(graphs, work, cache)

    monkeypatch.setattr(DecodeGraphs, "_record", note)
    return numbers


def model_on(device):
    return device.to(make_model(layers=LAYERS, attention="sdpa", eos_token_id=None))


def open_llm(device, tokenizer, rows=20, **options):
    # The order of steps must not depend on how long they take.
    options = {"prefix_cache": 0, "max_prefill_time_fraction": 0.999999, **options}
    return h2okv.LLM(model_on(device), tokenizer, max_num_seqs=rows, **options)


class Traffic:
    """Requests that come in waves to an engine, and what is seen of it after each step."""

    def __init__(self, llm, requests, logprobs=None):
        self.engine, self.pool, self.requests = llm.engine, llm.engine.runner.pool, []
        self.events, self.counts, self.snapshots = [], [], []
        sampling = h2okv.SamplingParams
        for index, (tokens, new) in enumerate(requests):
            params = sampling(max_tokens=new, temperature=0, ignore_eos=True, logprobs=logprobs)
            self.events.append([])
            self.requests.append(llm.engine.request(tokens, params, self.events[index].append))

    def step(self):
        self.engine.step()
        self.counts.append(len(self.pool._sequences))

    def run(self, waves):
        """Submit the next requests of a wave after the steps that it waits; then run to the end."""
        waiting = list(self.requests)
        for num_steps, num_requests in waves:
            for _ in range(num_steps):
                self.step()
            for request in waiting[:num_requests]:
                self.engine.scheduler.submit(request)
            del waiting[:num_requests]
            self.snapshots.append(self.snapshot())
        assert not waiting
        while self.engine.has_clients:
            self.step()
            if len(self.counts) % 6 == 0:
                self.snapshots.append(self.snapshot())

    def snapshot(self):
        """Return what layers hold of the sequences in use, by name."""
        used = len(self.pool._sequences)
        return [
            {name: tensor[:used].cpu().clone() for name, tensor in state.tensors().items()}
            for state in self.pool._states
        ]

    def answers(self):
        """Return the tokens and the log-probabilities of each request."""
        results = []
        for request, events in zip(self.requests, self.events, strict=True):
            logprobs = [p for event in events if event is not None for p in event.logprobs]
            tokens = request.outputs[0].tokens
            assert len(tokens) == request.max_new_tokens
            results.append((tokens, [entry.logprob for entry in logprobs]))
        return results


# Steps before requests come, and how many come. At most 20 run; the others wait for their slots.
WAVES = [(0, 1), (6, 1), (5, 1), (5, 2), (6, 1), (4, 14), (20, 3), (12, 3)]
assert sum(count for _, count in WAVES) == len(REQUESTS)


def alone(name, text, new):
    """Generate the new tokens of one text without engine, pool or device."""
    model = make_model(layers=LAYERS, attention="sdpa", eos_token_id=None)
    cache, ids = h2okv.H2OCache(model.config, **OPTIONS[name]), torch.tensor([text])
    options = {"max_new_tokens": new, "do_sample": False, CACHE: cache}
    with h2okv.enable(model):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, len(text) :
        ].tolist()


def compare(eager, replayed):
    """Compare the states of two engines after the same steps; empty slots may hold anything."""
    assert eager.counts == replayed.counts
    for before, after in zip(eager.snapshots, replayed.snapshots, strict=True):
        for expected, state in zip(before, after, strict=True):
            is_entry = expected["positions"] >= 0
            assert torch.equal(state["positions"] >= 0, is_entry)
            for name, tensor in expected.items():
                other = state[name]
                if tensor.shape[:3] == is_entry.shape:
                    tensor, other = tensor[is_entry], other[is_entry]
                if name in ("keys.codes", "values.codes"):  # of numbers that may be rounded apart
                    assert ((other.int() - tensor.int()).abs() <= 1).all()
                elif tensor.is_floating_point():
                    torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-5)
                else:
                    assert torch.equal(other, tensor), name


@pytest.mark.parametrize(
    "runs_ahead",
    [pytest.param(False, marks=pytest.mark.slow, id="reads first"),
     pytest.param(True, id="runs ahead")],
)  # fmt: skip
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "h2o")) for n in OPTIONS]
)
def test_requests_that_come_and_go(monkeypatch, tokenizer, records, cuts, name, runs_ahead):
    """Few graphs serve all numbers of sequences; tokens and states are those of eager steps."""
    monkeypatch.setattr(Engine, "runs_ahead", runs_ahead)
    results, replays = {}, []
    logprobs = None if runs_ahead else 2  # which the host reads after each step
    for setting in ("off", "auto"):
        monkeypatch.setenv(VARIABLE, setting)
        with pretended_device(monkeypatch, runs_kernels=True) as device:
            monkeypatch.setenv(dispatch.VARIABLE, "plain")
            with open_llm(device, tokenizer, **OPTIONS[name]) as llm:
                traffic = results[setting] = Traffic(llm, REQUESTS, logprobs)
                addresses = [t.data_ptr() for t in traffic.pool._tensors()]
                traffic.run(WAVES)
                assert addresses == [t.data_ptr() for t in traffic.pool._tensors()]
            replays.append(device.num_replays)
    compare(results["off"], results["auto"])
    answers = results["auto"].answers()
    for (tokens, numbers), expected in zip(answers, results["off"].answers(), strict=True):
        assert tokens == expected[0] and len(numbers) == (0 if runs_ahead else len(tokens))
        assert numbers == pytest.approx(expected[1], rel=1e-4, abs=1e-5)
    assert max(results["auto"].counts) == 20 and len(set(results["auto"].counts)) > 15
    variants = 2 if name == "budgets that differ" else 1  # with a mask of the slots and without
    assert len(records) <= variants * len([b for b in BUCKETS if b < 20] + [20])
    assert {6, 12, 16, 20} <= set(records) <= {*BUCKETS, 20}
    assert replays[0] == 0 and replays[1] >= len(results["auto"].counts) // 2
    # Most cuts are replayed: with spans of 5 and 7 one is due in nearly every step.
    is_cut = "spans" in name or "whole" in name
    assert all(cuts) and is_cut <= (0 < len(cuts) < len(results["auto"].counts) // 2)
    for (tokens, _), (text, new) in list(zip(answers, REQUESTS, strict=True))[::3]:
        assert tokens == alone(name, text, new)


UNREAD = {"keys", "values", "keys.codes", "keys.grid", "values.codes", "values.grid"}


@pytest.mark.parametrize("ops", ["plain", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in OPTIONS]
)
def test_a_row_that_is_not_in_use(monkeypatch, device, tokenizer, name, ops):
    """Steps pass through it, change nothing that is read, and leave it to the next request."""
    monkeypatch.setenv(dispatch.VARIABLE, ops)
    requests = [*((prompt(24 + i), 30) for i in range(5)), (prompt(33), 5), (prompt(37), 12)]
    with open_llm(device, tokenizer, rows=6, **OPTIONS[name]) as llm:
        traffic = Traffic(llm, requests)
        for request in traffic.requests[:6]:
            llm.engine.scheduler.submit(request)
        while not traffic.requests[5].is_over:
            traffic.step()
        traffic.step()
        states = traffic.pool._states
        for state in states:
            assert (state.positions[5] == -1).all()
            for tensor in (*state.entry_tensors().values(), state.scores, state.queries):
                if tensor is not None and tensor.is_floating_point():
                    tensor[5] = torch.nan  # which must not spread
        before = [{n: t[5].cpu().clone() for n, t in each.tensors().items()} for each in states]
        num_replays = device.num_replays
        for _ in range(6):
            traffic.step()
        assert traffic.counts[-6:] == [5] * 6 and device.num_replays > num_replays + 2
        for expected, state in zip(before, states, strict=True):
            tensors = {n: t[5].cpu() for n, t in state.tensors().items()}
            for field in expected.keys() - UNREAD - {"value_weights"}:
                now, former = tensors[field], expected[field]
                if field == "scores":  # but that of the slot that a token would take
                    changed = (now != former) & ~(now.isnan() & former.isnan())
                    assert changed.sum() <= tensors["free_slot"].numel()
                    now, former = now[changed], torch.zeros(())
                torch.testing.assert_close(
                    now, former.expand_as(now), rtol=0, atol=0, equal_nan=True
                )
        llm.engine.scheduler.submit(traffic.requests[6])
        while llm.engine.has_clients:
            traffic.step()
        assert 6 in traffic.counts[-20:]
    for (tokens, _), (text, new) in zip(traffic.answers(), requests, strict=True):
        assert tokens == alone(name, text, new)


@pytest.mark.slow
def test_long_prompts_by_replayed_chunks(monkeypatch, device, tokenizer):
    """Prompts that differ in length share one graph; answers are those of each text alone."""
    monkeypatch.setattr(prompt_chunks, "CHUNK", 14)
    name, requests = "best by head, spans", [(prompt(90 + 17 * i), 4) for i in range(4)]
    works, record = [], DecodeGraphs._record

    def note(graphs, work, cache):
        works.append(work.name)
        return record(graphs, work, cache)

    monkeypatch.setattr(DecodeGraphs, "_record", note)
    with open_llm(device, tokenizer, max_prefill_tokens=14, **OPTIONS[name]) as llm:
        traffic = Traffic(llm, requests)
        traffic.run([(0, 1), (3, 3)])
    assert works.count("chunk of a prompt") == 1 and device.num_replays > 12
    for (tokens, _), (text, new) in zip(traffic.answers(), requests, strict=True):
        assert tokens == alone(name, text, new)


@pytest.mark.slow
def test_layers_that_slide(monkeypatch, device, make_llm, make_prompts, gemma, records, greedy):
    """Windows are slots of a pool too."""
    monkeypatch.setenv(dispatch.VARIABLE, "plain")
    prompts, options = make_prompts([20, 31, 26, 17, 40]), {"max_num_seqs": 6, "prefix_cache": 0}
    params = [greedy(new) for new in (30, 12, 30, 20, 30)]
    model = device.to(copy.deepcopy(gemma))
    model.set_attn_implementation("sdpa")
    replayed = make_llm(model, **options).generate(prompts, params)
    monkeypatch.setenv(VARIABLE, "off")
    assert records == [6, 4, 3] and device.num_replays > 10
    for prompt, result, params_of in zip(prompts, replayed, params, strict=True):
        (expected,) = make_llm(device.to(copy.deepcopy(gemma)), **options).generate(
            [prompt], params_of
        )
        assert result.completions[0].token_ids == expected.completions[0].token_ids
