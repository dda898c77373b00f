"""The kernels of a cut against the choice and the copies that PyTorch does."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from h2okv.ops import triton_cut
from h2okv.ops.choice import CutRules, choose, protected_entries, recent_with_written
from h2okv.ops.compaction import NO_HEAD, compact, pick, share_slots
from h2okv.ops.triton_cut import Rooms, Rows, join, move, select

pytestmark = pytest.mark.usefixtures("garbage")
TINY = 1e-42  # no normal number
LEVELS = [
    [0.0], [0.0, -0.0, TINY, -TINY], [0.5, 0.5, 2.0, torch.inf], [-torch.inf, -3.0, -3.0, 0.0],
    [torch.inf, 1e30, 1.0000001, 1.0, 0.9999999], [float(n) for n in range(40)],
]  # fmt: skip


def column(numbers):
    return torch.tensor(numbers).view(-1, 1, 1)


@st.composite
def cuts(draw):
    """Draw the entries of two layers' heads, some slots empty, and the rules of a cut."""
    batch, heads, count = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    shape, seen = (batch, heads, count), count + draw(st.integers(0, 9))
    # Positions of different entries differ.
    positions = torch.rand(*shape[:2], seen, generator=generator).argsort(dim=-1)[..., :count]
    is_empty = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    positions = positions.masked_fill(is_empty, -1).to(torch.int32)
    levels = torch.tensor(draw(st.sampled_from(LEVELS)))
    priority = levels[torch.randint(len(levels), shape, generator=generator)]
    weights = None
    if draw(st.booleans()):
        weights = torch.rand(shape, generator=generator) + 0.5
    sinks = [draw(st.integers(0, 3)) for _ in range(batch)]
    recents = [draw(st.sampled_from([0, 2, 5, 60])) for _ in range(batch)]
    total = torch.tensor(
        [[draw(st.integers(sink + 1, 30)) for _ in range(heads)] for sink in sinks]
    )
    if draw(st.booleans()):
        total = total[:, :1]
    written = [draw(st.sampled_from([0, 4, 9])) for _ in range(batch)]
    rules = CutRules(
        torch.full((batch,), seen), column(sinks), column(recents), total.unsqueeze(-1),
        torch.tensor(written) if any(written) else None,
    )  # fmt: skip
    return priority, weights, positions, rules


def chosen_by_sort(priority, weights, positions, rules):
    recent = rules.recent
    if rules.written is not None:
        recent = recent_with_written(recent, rules.sink, rules.total, rules.written, priority)
    newest = rules.num_real_tokens.view(-1, 1, 1) - 1
    protected = protected_entries(positions, newest, rules.sink, recent)
    ranks = priority if weights is None else priority * weights
    return choose(ranks, positions, protected, rules.total, int(rules.total.max()))


def slots_of(chosen, row, num_slots):
    """Return which entry each slot has after a cut in place, -1 for none."""
    count, order = int(chosen.counts[row]), chosen.order[row].tolist()
    slots = []
    for slot, source in enumerate(order[:count]):
        is_moved = source >= num_slots
        slots.append(int(chosen.moves[row, source - num_slots]) if is_moved else source)
        assert is_moved or source == slot
    far = {number for number in range(count, num_slots) if order[number] == -2}
    assert far == {source for slot, source in enumerate(slots) if source != slot}
    assert all(order[number] in (-1, -2) for number in range(count, num_slots))
    return slots


@settings(max_examples=examples(60), deadline=None, phases=[Phase.generate])
@given(cut=cuts(), block=st.sampled_from([16, 64]))
def test_the_kernel_chooses_what_a_sort_does(cut, block):
    priority, weights, positions, rules = cut
    indices, is_kept = chosen_by_sort(*cut)
    limit = int(rules.total.max())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_cut, "_BLOCK_ENTRIES", block)
        arguments = priority, weights, priority, positions, rules, limit
        ordered, in_place = (select(*arguments, is_in_place) for is_in_place in (False, True))
    for row, (some, is_kept_here) in enumerate(
        zip(indices.flatten(0, 1), is_kept.flatten(0, 1), strict=True)
    ):
        expected = some[is_kept_here].tolist()
        assert ordered.counts[row] == in_place.counts[row] == len(expected)
        assert ordered.order[row, : len(expected)].tolist() == expected
        assert sorted(slots_of(in_place, row, positions.shape[2])) == expected


def draw_rows(batch, heads, count, size, dtype=torch.float32):
    positions = torch.rand(batch, heads, count).argsort(dim=-1).to(torch.int32)
    return Rows(
        torch.randn(batch, count, heads, size).to(dtype).transpose(1, 2),
        torch.randn(batch, heads, count, size + 3).to(dtype),
        torch.rand(batch, heads, count), positions, torch.rand(batch, heads, count),
    )  # fmt: skip


def empty_rows(source, rows, num_slots):
    return Rows(*(s.new_empty(len(s), rows, num_slots, *s.shape[3:]) for s in source))


def rules_of(source, totals, seen=None):
    batch, _, count = source.positions.shape
    return CutRules(
        torch.full((batch,), seen or count), column([1] * batch), column([3] * batch), totals
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_slots", [14, 40])
def test_new_slots_are_those_of_compact(dtype, num_slots):
    source = draw_rows(2, 3, 37, 20, dtype)
    totals = torch.full((2, 1, 1), 13)
    rules = rules_of(source, totals)
    chosen = select(source.scores, source.weights, *source[2:4], rules, 13, False)
    indices, is_kept = chosen_by_sort(source.scores, source.weights, source.positions, rules)
    assert is_kept.all()
    target, free = empty_rows(source, 3, num_slots), torch.zeros(2, 3, 1, dtype=torch.int64)
    move(source, target, 3, chosen, free=free)
    for states, actual in zip(source[:2], target[:2], strict=True):
        assert torch.equal(actual, compact(states, indices, num_slots))
    for numbers, actual, empty in zip(source[2:], target[2:], (0, -1, 2.0**-126), strict=True):
        assert torch.equal(actual[..., :13], numbers.gather(-1, indices))
        assert (actual[..., 13:] == empty).all()
    assert (free == 13).all()


@pytest.mark.parametrize("heads", [1, 3])
def test_slots_that_heads_share(heads):
    span, spare = 5, 7
    source = draw_rows(2, heads, 37, 16)
    source.positions[1, 0, 8:] = -1  # fewer entries than slots
    totals = torch.randint(6, 20, (2, heads, 1))
    rules = rules_of(source, totals)
    num_slots = int((totals + span).sum(dim=1).max()) + spare
    largest = max(int(totals.max()) + span, num_slots)
    rooms = Rooms(totals, span, largest)
    chosen = select(source.scores, None, *source[2:4], rules, int(totals.max()), False)
    target, free = empty_rows(source, 1, num_slots), torch.zeros(2, 1, heads, dtype=torch.int64)
    head_of_slot = torch.zeros(2, 1, num_slots, dtype=torch.uint8)
    move(source, target, heads, chosen, rooms, free, head_of_slot)
    indices, is_kept = chosen_by_sort(source.scores, None, source.positions, rules)
    room = totals + (span - 1)
    indices, is_kept, expected_heads = share_slots(indices, is_kept, room, num_slots)
    assert torch.equal(head_of_slot, expected_heads)
    of_slots = expected_heads.long() % heads
    for states, actual in zip(source, target, strict=True):
        expected = pick(states, indices, of_slots)
        assert torch.equal(actual[is_kept], expected[is_kept])
    assert (target.positions[~is_kept] == -1).all() and not target.scores[~is_kept].any()
    assert not target.keys[~is_kept].any() and not target.values[~is_kept].any()
    of_head = expected_heads == torch.arange(heads).unsqueeze(-1)
    is_free = of_head & (target.positions < 0)
    assert torch.equal(free, is_free.to(torch.uint8).argmax(dim=-1).unsqueeze(1))

    # And back: a row for each head.
    longest = int(totals.max()) + span
    by_head = empty_rows(source, heads, longest)
    move(target, by_head, heads, rooms=Rooms(totals, span, longest))
    for row in range(2):
        for head in range(heads):
            mine = of_head[row, head]
            for shared, actual in zip(target, by_head, strict=True):
                assert torch.equal(actual[row, head, : mine.sum()], shared[row, 0, mine])
            assert (by_head.positions[row, head, mine.sum() :] == -1).all()
    assert NO_HEAD in head_of_slot


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seen", [20, 90])
def test_a_cut_in_place_moves_few_and_loses_none(shares, seen, monkeypatch):
    monkeypatch.setattr(triton_cut, "_BLOCK_SLOTS", 16)  # what moves crosses programs
    batch, heads, span = 2, 3, 30
    totals = torch.randint(30, 60, (batch, heads, 1))
    if not shares:
        totals[:] = totals.max()
    longest = int(totals.max()) + span
    by_head = draw_rows(batch, heads, longest, 16)
    index = torch.arange(longest)
    by_head.positions[:] = torch.where(index < (totals + span).clamp(max=seen), index, -1)
    new_scores = torch.rand_like(by_head.scores)
    rules = rules_of(by_head, totals, seen)
    slots, rooms = by_head, None
    if shares:
        rooms = Rooms(totals, span, longest)
        num_slots = int((totals + span).sum(dim=1).max())
        everything = CutRules(*rules[:3], totals + span)
        chosen = select(*[by_head.scores, None, *by_head[2:4], everything], longest, False)
        slots = empty_rows(by_head, 1, num_slots)
        free, owners = torch.zeros(batch, 1, heads), torch.zeros(batch, 1, num_slots)
        free, owners = free.long(), owners.to(torch.uint8)
        move(by_head, slots, heads, chosen, rooms._replace(largest=num_slots), free, owners)
    else:
        slots = Rows(*(tensor.contiguous() for tensor in by_head))
        free = torch.zeros(batch, heads, 1, dtype=torch.int64)
    before = [tensor.clone() for tensor in slots]
    source = Rows(*slots[:2], new_scores, *(by_head if shares else slots)[3:])
    chosen = select(new_scores, source.weights, new_scores, source.positions, rules, longest, True)
    indices, is_kept = chosen_by_sort(new_scores, by_head.weights, by_head.positions, rules)
    move(source, slots, heads, chosen, rooms, free)
    starts = (totals + span).cumsum(dim=1) - (totals + span)
    for row in range(batch):
        for head in range(heads):
            first = int(starts[row, head]) if shares else 0
            end = first + int(totals[row, head]) + span
            at = (row, 0 if shares else head, slice(first, end))
            expected = indices[row, head][is_kept[row, head]].tolist()
            count = len(expected)
            entries = slots_of(chosen, row * heads + head, longest)
            assert sorted(entries) == expected
            assert free.view(batch, heads)[row, head] == first + count
            for name, actual, old in zip(Rows._fields, slots, before, strict=True):
                scores = new_scores[row, head] if name == "scores" else old[at]
                assert torch.equal(actual[at][:count], scores[entries]), name
            assert (slots.positions[at][count:] == -1).all()
            assert not slots.scores[at][count:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [False, True])
def test_a_block_is_put_behind_slots(dtype, shares):
    heads, span = 3, 5
    block = draw_rows(2, heads, 11, 20, dtype)
    scores = torch.zeros(()).expand(2, heads, 11)
    positions = torch.arange(50, 61, dtype=torch.int32).view(1, 1, -1).expand(2, heads, -1)
    block = block._replace(scores=scores, positions=positions, weights=None)
    totals = torch.tensor([[7, 13, 9], [8, 8, 8]]).unsqueeze(-1)
    longest = int(totals.max()) + span
    cached = draw_rows(2, heads, longest, 20, dtype)
    of_head = torch.arange(longest) < totals + span
    cached.positions[~of_head] = -1
    cached.positions[:, :, 4] = -1
    slots, rooms = Rows(*(tensor.contiguous() for tensor in cached)), None
    if shares:
        rooms = Rooms(totals, span, longest)
        num_slots = int((totals + span).sum(dim=1).max())
        rows = [[tensor[row][of_head[row]] for row in range(2)] for tensor in cached]
        room = [num_slots - len(tensor) for tensor in rows[0]]
        slots = Rows(*(
            torch.stack([
                torch.cat([row, torch.zeros(count, *row.shape[1:], dtype=row.dtype)])
                for row, count in zip(pair, room, strict=True)
            ]).unsqueeze(1) for pair in rows
        ))  # fmt: skip
    joined, is_entry = join(slots, block, rooms)
    for name, before, new, actual in zip(Rows._fields[:4], cached, block, joined, strict=False):
        if shares:
            empty = -1 if name == "positions" else 0
            before = before.clone()
            before[~of_head] = empty
        assert torch.equal(actual, torch.cat([before, new], dim=2)), name
    assert torch.equal(is_entry, joined.positions >= 0)
