"""Chunks of long prompts that are replayed from one CUDA graph, on the pretended device."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from pretended_device import DEVICE, pretended_device
from pretended_device import make_model as make_tiny

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.integration import graphs, prompt_chunks
from h2okv.integration.graphs import EAGER_STEPS, VARIABLE, DecodeGraphs
from h2okv.integration.prompt_chunks import chunking_of
from h2okv.policy import scoring

pytest.importorskip("triton")

LAYERS, SPAN, CHUNK = 2, 8, 16
BUDGET = {"heavy": 0.2, "recent": 0.1, "sink": 2, "evict_every": SPAN}
BY_HEAD = BUDGET | {"scoring": "expected", "layer_budgets": [[1.2, 0.8]] * LAYERS}
OPTIONS = {"best": BY_HEAD, "h2o": BUDGET | {"sink": 0}}


@pytest.fixture
def device(monkeypatch):
    with pretended(monkeypatch, runs_kernels=True) as device:
        yield device


@pytest.fixture
def fast_device(monkeypatch):
    """Pretend a device on which no kernel runs: what it would write are zeros."""
    with pretended(monkeypatch, runs_kernels=False) as device:
        yield device


@contextmanager
def pretended(monkeypatch, runs_kernels):
    monkeypatch.setattr(prompt_chunks, "CHUNK", CHUNK)
    with pretended_device(monkeypatch, runs_kernels, everywhere=True) as device:
        yield device


@contextmanager
def recording(model):
    """Let a model record from its first forward on; others do from their first step on."""
    with h2okv.enable(model):
        vars(model)["forward"] = recorded = DecodeGraphs(model)
        yield recorded


def arguments(start, stop, rows=1):
    """Return the inputs of tokens of a text, the same at each place for each call."""
    columns = torch.arange(start, stop)[None]
    ids = (columns * 7 + 5 * torch.arange(rows)[:, None]) % 90 + 3
    return {
        "input_ids": ids.to(DEVICE), "position_ids": columns.to(DEVICE), "logits_to_keep": 1,
        "attention_mask": torch.ones(rows, stop, dtype=torch.int64).to(DEVICE),
    }  # fmt: skip


def read(model, cache, start, stop, rows=1, mask=True):
    """Read tokens of a text; return the logits."""
    inputs = arguments(start, stop, rows)
    with torch.no_grad():
        output = model(**inputs if mask else inputs | {"attention_mask": None}, **{CACHE: cache})
    assert getattr(output, CACHE) is cache
    return output.logits.cpu()


def state_of(cache):
    """Return what layers hold, by head, and what the host has counted."""
    cache.check_integrity()
    tensors, counts = [], []
    for layer in cache.layers:
        positions, order = layer.state.by_head("positions")[0].cpu().sort()
        scores = layer.state.by_head("scores")[0].cpu().gather(-1, order)
        tensors.append((positions, scores.where(positions >= 0, 0.0)))
        state = layer.state
        counts.append((state.lengths(), state.scored_lengths, state.has_gaps))
        counts.append((layer.num_columns, layer.num_forwards, layer.slots.counters()))
    return tensors, counts


def texts(model, name, lengths, rows=1):
    """Read some texts, each with a step, a turn and another step; return all that comes of it."""
    results = []
    for length in lengths:
        cache = h2okv.H2OCache(model.config, **OPTIONS[name])
        edges = [0, length, length + 1, length + 3 * CHUNK, length + 3 * CHUNK + 1]
        for start, stop in zip(edges, edges[1:], strict=False):
            results.append((read(model, cache, start, stop, rows), *state_of(cache)))
    return results


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("best", 1),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("best", 2), ("h2o", 1))),
    ],
)
def test_replayed_chunks_equal_eager_ones(device, monkeypatch, name, rows):
    """In logits, entries, scores and what the host counts: prompts, steps and turns."""
    model = device.to(make_tiny(layers=LAYERS))
    lengths = [(EAGER_STEPS + 3) * CHUNK + 5]
    if rows > 1 or name != "best":  # also some that need more slots, and less
        lengths += [2 * CHUNK, 9 * CHUNK, 3 * CHUNK - 1]
    monkeypatch.setenv(VARIABLE, "off")
    with h2okv.enable(model):
        eager = texts(model, name, lengths, rows)
    assert device.num_replays == 0
    monkeypatch.setenv(VARIABLE, "auto")
    with recording(model) as recorded:
        replayed = texts(model, name, lengths, rows)
    assert device.num_replays >= 3 + len(lengths)
    assert not recorded.why
    for (logits, tensors, counts), (others, other_tensors, other_counts) in zip(
        eager, replayed, strict=True
    ):
        torch.testing.assert_close(logits, others)
        assert counts == other_counts
        for pair, other_pair in zip(tensors, other_tensors, strict=True):
            assert torch.equal(pair[0], other_pair[0])
            torch.testing.assert_close(pair[1], other_pair[1])


def long_prompt(model, num_chunks=EAGER_STEPS + 4):
    """Read a prompt of some chunks, by eager ones, one that is recorded, and replays."""
    cache = h2okv.H2OCache(model.config, **OPTIONS["best"])
    return cache, read(model, cache, 0, num_chunks * CHUNK)


def test_a_replayed_chunk_is_one_launch(fast_device):
    model = fast_device.to(make_tiny(layers=LAYERS))
    with recording(model):
        long_prompt(model, 10)
        counts = []
        for num_chunks in (6, 9):
            with fast_device.count() as counted:
                long_prompt(model, num_chunks)
            counts.append(counted)
        more = counts[1] - counts[0]
    # Of each chunk: its tokens and positions, and a copy of its logits, beside the graph itself.
    assert more.num_launches <= 3 * 3, str(more)
    assert more.num_waits == 0, str(more)


def test_a_first_replay_of_other_numbers_is_the_last(fast_device, monkeypatch):
    model = fast_device.to(make_tiny(layers=LAYERS))
    replay = torch.cuda.CUDAGraph.replay

    def spoiled(graph):
        replay(graph)
        list(graph_outputs)[-1].add_(1000.0)

    graph_outputs = []
    record = DecodeGraphs._record

    def noted(self, *args):
        graph = record(self, *args)
        graph_outputs.extend(t for t in graph.outputs.values() if t is not None)
        return graph

    monkeypatch.setattr(DecodeGraphs, "_record", noted)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", spoiled)
    with recording(model) as recorded:
        with pytest.warns(UserWarning, match="chunks of prompts run launch by launch"):
            cache, logits = long_prompt(model)
        assert "first replay's logits are off by" in recorded.why
        assert torch.equal(long_prompt(model)[1], logits)
    assert fast_device.num_replays == 1
    assert cache.num_seen_tokens == (EAGER_STEPS + 4) * CHUNK


def test_a_chunk_that_waits_is_not_recorded(fast_device, monkeypatch):
    model = fast_device.to(make_tiny(layers=LAYERS))
    norm = model.model.norm
    forward = type(norm).forward

    def waiting(self, states):
        assert states.sum().item() is not None
        return forward(self, states)

    monkeypatch.setattr(type(norm), "forward", waiting)
    with recording(model) as recorded:
        with pytest.warns(UserWarning, match="chunks of prompts run launch by launch"):
            cache, _ = long_prompt(model)
        assert recorded.why == "a chunk of a prompt of this model and cache waits for the device"
    assert cache.num_seen_tokens == (EAGER_STEPS + 4) * CHUNK
    assert fast_device.num_replays == 0


def test_an_interrupted_chunk_is_noticed(fast_device, monkeypatch):
    model = fast_device.to(make_tiny(layers=LAYERS))
    replay = torch.cuda.CUDAGraph.replay
    with recording(model):
        long_prompt(model)
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", interrupt)
        cache = h2okv.H2OCache(model.config, **OPTIONS["best"])
        with pytest.raises(KeyboardInterrupt):
            read(model, cache, 0, 5 * CHUNK)
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
        with pytest.raises(ValueError, match="an earlier forward was interrupted"):
            read(model, cache, CHUNK, CHUNK + 1)
        cache.reset()
        read(model, cache, 0, 5 * CHUNK)
        assert cache.num_seen_tokens == 5 * CHUNK


def interrupt(graph):
    raise KeyboardInterrupt


def test_slots_of_shorter_prompts_are_freed_at_once(fast_device):
    """Without the garbage collector, as a GPU's memory is short."""
    model = fast_device.to(make_tiny(layers=LAYERS))
    gc.collect()
    gc.disable()
    try:
        with recording(model) as recorded:
            cache, _ = long_prompt(model)
            space = weakref.ref(recorded._workspace)
            longer, _ = long_prompt(model, 20)
        assert space() is None
        assert cache.num_seen_tokens < longer.num_seen_tokens
    finally:
        gc.enable()


def test_chunks_that_do_not_follow_are_refused(fast_device):
    model = fast_device.to(make_tiny(layers=LAYERS))
    with recording(model):
        cache, _ = long_prompt(model)
        with pytest.raises(ValueError, match="whose positions begin at 0, which does not go on"):
            read(model, cache, 0, 2 * CHUNK, mask=False)


def test_numbers_that_are_not_finite_are_refused(fast_device):
    model = fast_device.to(make_tiny(layers=LAYERS))
    with recording(model) as recorded:
        long_prompt(model)
        space = recorded._workspace
        give = space.give

        def give_infinity(cache, length):
            space.sums[1] += torch.inf
            give(cache, length)

        space.give = give_infinity
        with pytest.raises(ValueError, match="attention of layer 1 is not finite"):
            long_prompt(model)


class Weighed(scoring.Expected):
    """A scoring of a user's, with a setting that a recording has inside."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight


def test_caches_of_one_kind_share_their_slots(fast_device):
    model = fast_device.to(make_tiny(layers=LAYERS))

    def cache_of(weight=1.0, **options):
        cache = h2okv.H2OCache(model.config, **OPTIONS["best"] | options)
        cache.rule.scoring = Weighed(weight)
        read(model, cache, 0, CHUNK)
        return cache

    with h2okv.enable(model):
        space = prompt_chunks.Workspace(cache_of())
        assert space.has_room_for(cache_of()) and space.has_room_for(cache_of(sink=1))
        for other in (cache_of(0.5), cache_of(heavy=0.9), cache_of(evict_every=2 * SPAN)):
            assert not space.has_room_for(other)


OTHERS = {
    "after each token": {"evict_every": None}, "whole prompts": {"evict_every": f"prompt+{SPAN}"},
    "8 bits": {"kv_bits": 8}, "rolling": {"positions": "rolling"}, "of all tokens": {"grows": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_prompts_of_other_caches_are_read_as_they_are(fast_device, name):
    model = fast_device.to(make_tiny(layers=LAYERS))
    cache = h2okv.H2OCache(model.config, **BUDGET | {"scoring": "expected"} | OTHERS[name])
    assert chunking_of(model, arguments(0, 3 * CHUNK), cache) is None


CHANGES = {
    "pins": lambda cache, inputs: cache.pin([(3, 6)]),
    "recorded evictions": lambda cache, inputs: cache.record_evictions(),
    "drafts": lambda cache, inputs: cache.activate_past_recording(),
    "all logits": lambda cache, inputs: inputs.update(logits_to_keep=0),
    "an image": lambda cache, inputs: inputs.update(pixel_values=inputs["input_ids"]),
    "padding": lambda cache, inputs: inputs.update(attention_mask=inputs["input_ids"] > 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_prompts_of_which_more_is_noted_are_read_as_they_are(fast_device, name):
    model, inputs = fast_device.to(make_tiny(layers=LAYERS)), arguments(0, 3 * CHUNK)
    cache = h2okv.H2OCache(model.config, **OPTIONS["best"])
    assert chunking_of(model, inputs, cache) == (CHUNK, CHUNK)
    CHANGES[name](cache, inputs)
    assert chunking_of(model, inputs, cache) is None


def test_without_memory_for_their_slots_prompts_are_read_as_they_are(fast_device, monkeypatch):
    def fail(cache):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(graphs, "Workspace", fail)
    model = fast_device.to(make_tiny(layers=LAYERS))
    with recording(model), pytest.warns(UserWarning, match="memory has no room for their slots"):
        cache, _ = long_prompt(model)
    assert cache.num_seen_tokens == (EAGER_STEPS + 4) * CHUNK
