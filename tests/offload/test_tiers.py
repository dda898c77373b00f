"""Caches outside the memory give what caches in memory give; each fault of the fork has a test."""

import os
import sys
from pathlib import Path

import pytest
import torch

import h2okv
from h2okv.offload.batch_runner import ForwardScheduler, Limits, MicroBatch
from h2okv.offload.meta_model import split_model
from h2okv.offload.tiers import CacheStore

CPU = torch.device("cpu")
LENGTHS = (23, 7, 40, 31, 12, 40, 2, 18)
LAYERS = 4
PLACEMENTS = {
    "file": ["file"] * LAYERS,
    "cpu": ["cpu"] * LAYERS,
    "mixed": ["device", "file", "cpu", "file"],
}


@pytest.fixture
def model(make_llama):
    # Its own: hooks stay on a model.
    return make_llama(layers=LAYERS)


def tiered(model, tiers, folder):
    store = CacheStore(tiers, Path(folder), CPU)
    return ForwardScheduler(split_model(model).units, store=store)


OPTIONS = {
    "fractions": {},
    "tokens": {"heavy": 3, "recent": 2},
    "budget of one": {"heavy": 0, "recent": 1},
    "full": {"policy": "full"},
    "rolling": {"positions": "rolling", "heavy": 6, "recent": 4},
    "by head": {"layer_budgets": ((0.5, 1.5), (1.75, 0.25)) * 2},
    "in spans": {"heavy": 6, "recent": 4, "evict_every": 6, "scoring": "expected", "sink": 4},
}
PACKED = {
    "8 bits": {"kv_bits": 8},
    "6 bits": {"kv_bits": 6},
    "4 bits": {"kv_bits": 4},
    "4 bits, budget of one": {"kv_bits": 4, "heavy": 0, "recent": 1},
    "8 bits, full": {"kv_bits": 8, "policy": "full"},
    "4 bits, rolling": {"kv_bits": 4, "positions": "rolling", "heavy": 6, "recent": 4},
    "8 bits, by norm, in blocks": {"kv_bits": 8, "scoring": "value_norm", "evict_every": 7},
}
CASES = {f"{o}, {p}": (OPTIONS[o], PLACEMENTS[p]) for o in OPTIONS for p in PLACEMENTS}
CASES |= {name: (options, PLACEMENTS["mixed"]) for name, options in PACKED.items()}
QUICK = ("tokens, mixed", "by head, mixed", "in spans, mixed")


@pytest.mark.parametrize(
    ("options", "tiers"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_tokens_equal_those_with_caches_in_memory(
    model, make_sequences, run_engine, tmp_path, tiers, options
):
    rooms = [3, 9, 1, 9, 30, 9, 5, 40]
    for limits in (Limits(8, 60, 8), Limits(5, 40, 2)):
        expected = run_engine(model, make_sequences(LENGTHS, rooms), limits, **options)
        scheduler = tiered(model, tiers, tmp_path)
        output = run_engine(model, make_sequences(LENGTHS, rooms), limits, scheduler, **options)
        scheduler.close()
        assert output == expected


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
def test_growing_past_the_first_slots(model, make_sequences, run_engine, tmp_path, bits):
    sequences = [make_sequences((30, 20), [280, 300]) for _ in range(2)]
    options = {"policy": "full", "kv_bits": bits}
    expected = run_engine(model, sequences[0], **options)
    scheduler = tiered(model, PLACEMENTS["mixed"], tmp_path)
    assert run_engine(model, sequences[1], None, scheduler, **options) == expected
    scheduler.close()


def states(scheduler, model, batches, steps):
    """Return the state of each layer of each cache after some steps, keys and values too."""
    with h2okv.enable(model), torch.inference_mode():
        for _ in range(steps):
            for batch, logits in scheduler.run(model, batches):
                batch.take(logits.argmax(dim=-1).tolist())
    all_states = []
    for batch in batches:
        for index, layer in enumerate(batch.cache.layers):
            scheduler.store.load(batch.cache, index)
            entries = layer.state.entry_tensors()
            entries |= {"scores": layer.state.scores, "positions": layer.state.positions}
            all_states.append({name: tensor.clone() for name, tensor in entries.items()})
            scheduler.store.save(batch.cache, index, is_new=True)
    return all_states


def micro_batches(model, sequences, bits=None):
    """Two with distinct prompts, a padded one among them."""
    return [
        MicroBatch(group, h2okv.H2OCache(model.config, heavy=4, recent=3, kv_bits=bits), CPU)
        for group in (sequences[:3], sequences[3:5])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 8, 6, 4])
@pytest.mark.parametrize("tiers", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_entries_and_scores_of_caches_stay_apart(model, make_sequences, tmp_path, tiers, bits):
    # The fork lets micro-batches share a workspace, and layers a score buffer: then one would hold
    # what is another's. Generation goes on for longer than the prompts are.
    steps = 45
    batches, other = (micro_batches(model, make_sequences(LENGTHS, 99), bits) for _ in range(2))
    expected = states(ForwardScheduler(), model, other, steps)
    scheduler = tiered(model, tiers, tmp_path)
    actual = states(scheduler, model, batches, steps)
    scheduler.close()
    if sys.platform == "linux":  # the disk has its room again
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert len(actual) == 2 * LAYERS
    for layer, same in zip(actual, expected, strict=True):
        assert layer.keys() == same.keys() and len(layer) == (4 if bits is None else 6)
        assert all(torch.equal(layer[name], same[name]) for name in same)
    scores = [layer["scores"] for layer in actual[:LAYERS]]
    assert not any(torch.equal(scores[0], other) for other in scores[1:])
    for batch in (actual[:LAYERS], actual[LAYERS:]):
        # Padding never becomes an entry, not in 45 steps either.
        assert all(int((layer["positions"] >= 0).sum(dim=-1).min()) == 7 for layer in batch)


@pytest.mark.parametrize(("bits", "entry"), [(None, 2 * 16 * 8), (8, 2 * 20), (4, 2 * 12)])
def test_only_the_changed_slot_is_written(model, make_sequences, tmp_path, bits, entry):
    # An entry is a key and a value of 16 numbers: fp64, or codes and a grid of two bf16 numbers.
    store = CacheStore(["file"] * LAYERS, tmp_path, CPU)
    scheduler = ForwardScheduler(split_model(model).units, store=store)
    cache = h2okv.H2OCache(model.config, heavy=4, recent=4, kv_bits=bits)
    batch = MicroBatch(make_sequences((30, 30), 9), cache, CPU)
    written = []
    with h2okv.enable(model), torch.inference_mode():
        for _ in range(4):
            before = store.bytes_written
            for _, logits in scheduler.run(model, [batch]):
                batch.take(logits.argmax(dim=-1).tolist())
            written.append(store.bytes_written - before)
    scheduler.close()
    heads = 2 * LAYERS * 2  # rows, layers, KV heads
    assert written[0] == heads * 9 * entry
    assert written[1:] == [heads * entry] * 3


@pytest.fixture
def used(model, make_sequences, tmp_path):
    """Make a store with a file for each layer, and a cache in them."""
    store = CacheStore(["file"] * LAYERS, tmp_path, CPU)
    scheduler = ForwardScheduler(split_model(model).units, store=store)
    batch = MicroBatch(make_sequences((9,), 9), h2okv.H2OCache(model.config), CPU)

    def run():
        with h2okv.enable(model), torch.inference_mode():
            return list(scheduler.run(model, [batch]))

    yield store, batch, run
    scheduler.close()


def test_files_have_no_name_and_end_with_their_cache(used, tmp_path):
    store, batch, run = used
    run()
    assert not list(tmp_path.iterdir())  # nothing that a kill could leave behind
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    store.drop(batch.cache)
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in maps


def test_a_full_disk(used, monkeypatch):
    _, _, run = used

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ValueError, match="cannot be made or grow .No space left.*for --output"):
        run()


def test_a_folder_that_is_not_there(used, tmp_path):
    _, _, run = used
    tmp_path.rmdir()
    with pytest.raises(ValueError, match="the cache's file in .* cannot be made .*No such file"):
        run()
