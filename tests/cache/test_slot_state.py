"""Slots: how many there are, what they take, and who may look into them."""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import pytest
import torch
from oracle import cache_of
from safetensors import safe_open

import h2okv
from h2okv.cache import base_layer, slot_state, slots
from h2okv.cache.slot_pool import SlotPool
from h2okv.cache.slot_state import KVStorage, SlotState, slots_for
from h2okv.ops.decode import Kind
from h2okv.vllm_plugin import state as blocks


def tokens(length, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


@torch.no_grad()
def follow(model, cache, ids, mask, blocks):
    """Logits of a text read in blocks."""
    logits, position_ids = [], (mask.cumsum(dim=1) - 1).clamp(min=0)
    at = 0
    for size in blocks:
        to = at + size
        logits.append(
            model(
                ids[:, at:to], attention_mask=mask[:, :to], position_ids=position_ids[:, at:to],
                past_key_values=cache,
            ).logits
        )  # fmt: skip
        at = to
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("budget", [(30, 20, 1), (25, 0.4, 0), (300, 200, 0)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "rolling"}, {"kv_bits": 4},
     {"scoring": "value_norm", "positions": "rolling"}, {"scoring": "decay"},
     {"policy": "strided_heavy"}, {"policy": "snapkv"}, {"policy": "full"}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)  # fmt: skip
def test_growing_changes_nothing(make_llama, kept_sets, monkeypatch, options, budget, padding):
    monkeypatch.setattr(slot_state, "MIN_GROWN_SLOTS", 0)
    model, ids = make_llama(layers=1), tokens(75, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    blocks = [12, *[1] * 30, 3, *[1] * 30]
    heavy, recent, sink = budget
    dropped, masked = (
        cache_of(model.config, heavy, recent, sink, masks=masks, **options)
        for masks in (False, True)
    )
    logits, expected = (follow(model, cache, ids, mask, blocks) for cache in (dropped, masked))
    real = mask.bool()
    torch.testing.assert_close(logits[real], expected[real], atol=2e-4, rtol=1e-4)
    assert kept_sets(dropped) == kept_sets(masked)
    dropped.check_integrity()


def pad_one(model, cache):
    mask = torch.ones(2, cache.num_seen_tokens + 1, dtype=torch.long)
    mask[0, -1] = 0
    position_ids = cache.num_seen_tokens + torch.zeros(2, 1, dtype=torch.long)
    args = {"attention_mask": mask, "position_ids": position_ids, "past_key_values": cache}
    model(tokens(1, batch=2), **args)


def join_its_copy(model, cache):
    for layer, other in zip(cache.layers, cache.fork(1).layers, strict=True):
        layer.join(other)


CHANGES = {
    "none": lambda model, cache: None,
    "sequences are chosen": lambda model, cache: cache.batch_select_indices(torch.tensor([1, 1])),
    "a step is compiled": lambda model, cache: cache.prepare_step(),
    "a sequence gets padding": pad_one,
    "another cache joins": join_its_copy,
    "a block": lambda model, cache: model(tokens(3, batch=2), past_key_values=cache),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_taking_slots_in_their_order_changes_nothing(make_llama, kept_sets, dtype, change):
    """Neither what is attended to nor what is evicted once the budget is reached."""
    model = make_llama(layers=2).to(dtype)
    in_order = cache_of(model.config, 60, 40, 2)
    model(tokens(50, batch=2), past_key_values=in_order)
    searched, counts = in_order.fork(1), []
    for step in range(80):
        if step == 10:
            for cache in (in_order, searched):
                CHANGES[change](model, cache)
        first = in_order.layers[0]
        tail = first.slots.take_tail(first.state)
        counts.append(tail and tail.end)
        for layer in searched.layers:
            layer.slots.drop_tail()
        token = tokens(1, batch=in_order.layers[0].batch_size, seed=step)
        logits, expected = (model(token, past_key_values=c).logits for c in (in_order, searched))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert counts[0] == 50 and counts[9] == 59 and counts[-1] is None
    if change in ("none", "sequences are chosen"):
        assert counts[10] == 60
    assert kept_sets(in_order) == kept_sets(searched)
    in_order.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_budget_in_tokens_costs_what_the_text_needs(make_llama, dtype):
    """Of a head of 64 numbers, a tenth more than a full cache, however large the budget is."""
    model = make_llama(layers=2, head_dim=64).to(dtype)
    caches = [cache_of(model.config, 8192, 8192), cache_of(model.config, 1 << 50, 1)]
    limit = 1.1 if dtype == torch.float32 else 1.12  # scores and positions are 8 bytes of each slot
    for cache in caches:
        slots = []
        for length in (64, *[1] * 200):
            model(tokens(length), past_key_values=cache)
            assert cache.nbytes <= limit * cache.full_nbytes
            slots.append(cache.kept_positions(0).shape[2])
        # Steps keep their tensors but for a few.
        assert len(set(slots)) < 40 and max(slots) < 300
        cache.check_integrity()


@torch.no_grad()
def test_a_compiled_step_gets_all_slots_at_once(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 100, 100)
    model(tokens(20), past_key_values=cache)
    assert cache.kept_positions(0).shape[2] < 30
    expected = cache.fork(1)
    assert cache.prepare_step()
    assert cache.kept_positions(0).shape[2] == 201
    for _ in range(5):
        logits = model(tokens(1), past_key_values=cache).logits
        torch.testing.assert_close(logits, model(tokens(1), past_key_values=expected).logits)
    assert cache.kept_positions(0).shape[2] == 201
    cache.check_integrity()


def test_slots_for():
    assert slots_for(10, 31) == 31  # too few to be worth growing into
    assert slots_for(64, 16385) == 69
    assert slots_for(16384, 16385) == 16385
    sizes = [slots_for(count) for count in range(0, 4000)]
    assert all(smaller <= other for smaller, other in pairwise(sizes))
    assert all(
        count + 1 < size <= count + 1 + max(4, count / 16) for count, size in enumerate(sizes)
    )


def test_a_move_asks_the_model_anew_how_it_rotates(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 6, 6, positions="rolling")
    with torch.no_grad():
        model(tokens(30), past_key_values=cache)
    layer = cache.layers[0]
    assert layer.rotations.rolling is not None and layer.rotations.tables is not None
    layer.move(torch.device("meta"))
    assert layer.rotations.rolling is None and layer.rotations.tables is None
    assert layer.slots.operations is None
    assert not layer.rotations.is_known
    tensors = [*layer.state.tensors().values(), layer.cumulative_length]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("bits", [None, 4])
def test_sequences_are_selected_put_together_and_copied(bits):
    key = torch.randn(3, 2, 5, 8)
    storage = KVStorage(bits)
    state = SlotState.empty(key, key, storage)
    state.keys, state.values = storage.keys.store(key), storage.values.store(2 * key)
    state.scores, state.positions = torch.rand(3, 2, 5), torch.arange(30).int().view(3, 2, 5)
    state.ranks = state.positions % 5
    selected = state.index_select(torch.tensor([2, 0]))
    copied = state.like(1, 7)
    copied.copy_sequence(0, state, 1)
    assert torch.equal(copied.positions[0, :, :5], state.positions[1])
    assert (copied.positions[0, :, 5:] == -1).all() and (copied.ranks[0, :, 5:] == 6).all()
    expected = {name: t[[2, 0, 1]] for name, t in state.tensors().items()}
    # Of different numbers of slots.
    selected.cat(copied)
    for name, tensor in selected.tensors().items():
        wide = expected[name].dim() > 2 and expected[name].shape[2] == 5
        assert torch.equal(tensor[:, :, :5] if wide else tensor, expected[name])
    assert selected.nbytes == sum(
        selected_tensor.nbytes
        for name, selected_tensor in selected.tensors().items()
        if selected.num_slots in selected_tensor.shape
    )


def test_no_getattr_on_layers():
    source = Path(h2okv.__file__).parent
    lookup = re.compile(r"(?:getattr|hasattr|setattr)\((?:layer|upper|lower|own)\b")
    files = [
        path.name
        for folder in ("cache", "engine", "offload")
        for path in (source / folder).rglob("*.py")
        if lookup.search(path.read_text(encoding="utf-8"))
    ]
    assert files == []


@dataclass
class Marked(SlotState):
    """A state with one more number of each entry: 3 times its position and 1."""

    marks: Annotated[torch.Tensor | None, Kind(torch.int16, empty=-7, file_name="signs")] = None


def mark(cache):
    for layer in cache.layers:
        positions = layer.state.positions
        layer.state.marks = torch.where(positions >= 0, 3 * positions + 1, -7).to(torch.int16)


def check_marks(cache, length, device="cpu"):
    """Entries of the first tokens are marked, later ones and empty slots are not."""
    for layer in cache.layers:
        state = layer.state
        assert isinstance(state, Marked) and state.marks.device.type == device
        assert state.marks.shape == state.positions.shape and state.marks.is_contiguous()
        if device == "cpu":
            is_marked = (state.positions >= 0) & (state.positions < length)
            assert is_marked.any()
            expected = torch.where(is_marked, 3 * state.positions + 1, -7)
            assert torch.equal(state.marks, expected.to(torch.int16))


@pytest.mark.parametrize("by_head", [False, True])
@torch.no_grad()
def test_a_tensor_is_carried_wherever_its_state_goes(make_llama, monkeypatch, tmp_path, by_head):
    """Nothing but its declaration names it."""
    monkeypatch.setattr(base_layer, "SlotState", Marked)
    for module in (slot_state, slots):
        monkeypatch.setattr(module, "MIN_GROWN_SLOTS", 0)
    model = make_llama()
    budgets = {"layer_budgets": [[0.5, 1.5]] * 2} if by_head else {}
    cache = cache_of(model.config, 20, 10, evict_every=8, **budgets)

    def read(cache, length, **options):
        model(tokens(length, batch=2), past_key_values=cache, **options)

    read(cache, 21)
    mark(cache)
    num_slots = cache.layers[0].state.num_slots
    for _ in range(12):  # grows, then evicts after a token
        read(cache, 1)
        check_marks(cache, 21)
    assert cache.layers[0].state.num_slots > num_slots
    read(cache, 10)  # evicts within a block
    check_marks(cache, 21)
    before, others = cache.nbytes, cache.fork(1)
    for layer in others.layers:
        layer.state.marks = None
    assert before - others.nbytes == sum(layer.state.marks.nbytes for layer in cache.layers)

    cache.activate_past_recording()
    expected = cache.fork(1)
    for _ in range(7):  # in a span, and beyond its end
        read(cache, 1)
        for layer in cache.layers:  # as a step of the tensor's own would change it
            layer.state.marks += 1
    cache.crop(-7)
    check_marks(cache, 21)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(layer.state.marks, other.state.marks)

    cache.batch_select_indices(torch.tensor([1]))
    check_marks(cache, 21)
    for layer, other in zip(cache.layers, cache.fork(2).layers, strict=True):
        layer.join(other)
    assert cache.layers[0].state.marks.shape[0] == 3
    cache.save(tmp_path / "c")
    loaded = h2okv.H2OCache.load(tmp_path / "c", model)
    check_marks(loaded, 21)
    with safe_open(tmp_path / "c", framework="pt") as file:
        assert "0.signs" in file.keys()  # noqa: SIM118  # safe_open is no mapping

    pool = SlotPool(cache, 2, cache.layer_entries_for(21), grows=True)
    for sequence in range(2):
        pool.admit(cache, sequence)
        check_marks(pool.cache, 21)
    pool.release(0)
    check_marks(pool.cache, 21)
    for layer in loaded.layers:
        layer.move(torch.device("meta"))
    check_marks(loaded, 21, "meta")
    assert Marked.metadata_bytes() == SlotState.metadata_bytes() + 2
    monkeypatch.setattr(blocks, "SlotState", Marked)
    shape = blocks.LayerShape(0, num_heads=4, num_kv_heads=2, size=16, dtype=torch.float32)
    assert blocks.StateLayer(cache.cache_config, shape, 1.0).spec["marks"][1] == torch.int16
