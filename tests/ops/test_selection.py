"""The choice of entries against a slow sort in plain Python, with many ties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from h2okv.ops.choice import choose, choose_all, protected_entries
from h2okv.ops.compaction import compact
from h2okv.ops.decode import Slots, StepRules, evict_one
from h2okv.ops.reference import AttentionSpec


@st.composite
def layers(draw):
    """Draw a layer's entries in any order of the slots; few priorities, some slots empty."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    slots = draw(st.integers(1, 12))
    levels = draw(st.sampled_from([[0.0], [0.0, 1.0], [0.0, 0.5, 0.5, 2.0]]))
    positions = torch.full((batch, heads, slots), -1, dtype=torch.int32)
    newest = torch.zeros(batch, 1, 1, dtype=torch.int64)
    for row in range(batch):
        seen = draw(st.integers(1, 20))
        num_entries = draw(st.integers(1, min(seen, slots)))
        newest[row] = seen - 1
        for head in range(heads):
            # The newest token is always held.
            older = draw(st.permutations(range(seen - 1)))[: num_entries - 1]
            order = draw(st.permutations([*older, seen - 1, *[-1] * (slots - num_entries)]))
            positions[row, head] = torch.tensor(order)
    priority = torch.tensor(
        draw(
            st.lists(
                st.sampled_from(levels), min_size=positions.numel(), max_size=positions.numel()
            )
        )
    ).view(positions.shape)
    return priority, positions, newest


def column(values):
    return torch.tensor(values).view(-1, 1, 1)


def ranked(priority, positions, newest, sink, recent):
    """Return the slots of entries, first to be evicted first, protected ones last."""

    def key(slot):
        position = positions[slot]
        protected = position < sink or position > newest - recent
        return protected, 0.0 if protected else priority[slot], position

    return sorted((slot for slot, position in enumerate(positions) if position >= 0), key=key)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), layer=layers())
def test_choose_against_a_sort(data, layer):
    priority, positions, newest = layer
    batch, heads, _ = positions.shape
    sinks = [data.draw(st.integers(0, 2)) for _ in range(batch)]
    recents = [data.draw(st.integers(0, 4)) for _ in range(batch)]
    # The contract: the budget always has room for what is protected.
    totals = [
        s + r + data.draw(st.integers(0, 4)) or 1 for s, r in zip(sinks, recents, strict=True)
    ]
    protected = protected_entries(positions, newest, column(sinks), column(recents))
    indices, is_kept = choose(priority, positions, protected, column(totals), max(totals))
    for row in range(batch):
        for head in range(heads):
            order = ranked(
                priority[row, head].tolist(), positions[row, head].tolist(),
                int(newest[row]), sinks[row], recents[row],
            )  # fmt: skip
            chosen = indices[row, head][is_kept[row, head]].tolist()
            assert chosen == sorted(order[-totals[row] :])


def freed(priority, positions, newest, sink, recent, slot_mask, full):
    """Return the slots that a step frees, which are empty then; nothing else changes."""
    unread, remaining = torch.empty(0), positions.clone()
    free = torch.zeros(*positions.shape[:2], 1, dtype=torch.int64)
    slots = Slots(
        unread, unread, priority.clone(), remaining, free, newest.flatten() + 1, slot_mask
    )
    evict_one(slots, StepRules(AttentionSpec(1.0), recent, sink), full, newest)
    assert slots.free_slot is free and torch.equal(slots.scores, priority)
    assert torch.equal(remaining, positions.scatter(-1, free, -1))
    return free


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), layer=layers())
def test_the_freed_slot_against_a_sort(data, layer):
    priority, positions, newest = layer
    batch, heads, slots = positions.shape
    sink, recent = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
    slot_mask = None
    if data.draw(st.booleans()):
        # Slots out of the budget are always empty ones.
        slot_mask = (positions >= 0).any(dim=1, keepdim=True)
        slot_mask |= torch.rand(slot_mask.shape) < 0.5
    windows = column([sink] * batch) if sink else None, column([recent] * batch)
    protected = protected_entries(positions, newest, *windows)
    chosen = freed(priority, positions, newest, *windows, slot_mask, full=False)
    if bool((positions >= 0).all()):
        same = freed(priority, positions, newest, *windows, None, full=True)
        assert torch.equal(chosen, same)
    for row in range(batch):
        for head in range(heads):
            slot_positions = positions[row, head].tolist()
            open_slots = [
                slot
                for slot in range(slots)
                if slot_positions[slot] < 0 and (slot_mask is None or slot_mask[row, 0, slot])
            ]
            slot = int(chosen[row, head, 0])
            if open_slots:
                assert slot in open_slots
            else:
                order = ranked(
                    priority[row, head].tolist(), slot_positions, int(newest[row]), sink, recent
                )
                # With everything protected any entry is as good: the budget rules that out.
                if not protected[row, head][positions[row, head] >= 0].all():
                    assert slot == order[0]


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("limit", [5, 9])
def test_where_none_has_to_leave_all_are_chosen(has_gaps, limit):
    positions = torch.tensor([[[7, -1, 2, 3, 0, -1, 5], [0, 1, -1, -1, 4, 6, 2]]])
    if not has_gaps:
        positions, limit = positions.masked_fill(positions < 0, 9), limit + 2
    total = torch.full((1, 2, 1), limit)
    scores, protected = torch.randn(1, 2, 7), torch.zeros(1, 2, 7, dtype=torch.bool)
    indices, is_kept = choose_all(positions, has_gaps, limit)
    expected, expected_kept = choose(scores, positions, protected, total, limit)
    assert torch.equal(is_kept, expected_kept)
    assert torch.equal(indices[is_kept], expected[is_kept])


def test_equal_priorities_lose_the_oldest_wherever_it_lies():
    positions = torch.tensor([[[7, 3, 9, 4]]], dtype=torch.int32)
    zeros, newest = torch.zeros(1, 1, 4), column([9])
    assert freed(zeros, positions, newest, None, column([1]), None, full=True).item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("size", [1, 40, 96, 128])
def test_whole_entries_are_copied_whatever_their_strides(dtype, size):
    entries = torch.randn(2, 63, 3, size).abs().mul(9).to(dtype).transpose(1, 2)
    indices = 1 + torch.rand(2, 3, 62).argsort(dim=-1)[..., :35]
    expected = entries.gather(2, indices.unsqueeze(-1).expand(-1, -1, -1, size))
    if dtype.is_floating_point:
        entries[:, :, 0] = torch.nan  # what was not chosen must not come into empty slots
    for num_slots in (41, 35):
        copied = compact(entries, indices, num_slots)
        assert copied.is_contiguous() and copied.shape == (2, 3, num_slots, size)
        assert torch.equal(copied[:, :, :35], expected) and not copied[:, :, 35:].any()
