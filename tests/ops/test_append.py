"""Steps that append against attention by a formula, and their tail."""

import pytest
import torch

from h2okv.ops import append, triton_decode
from h2okv.ops.append import Appended, Tail, append_step, finish_steps
from h2okv.ops.decode import QueryRing, Slots, StepRules
from h2okv.ops.reference import AttentionSpec

HEADS, SIZE, GROUPS = 3, 8, 2
COUNTS = {
    "heads and sequences alike": [[5, 5, 5], [5, 5, 5]],
    "sequences differ": [[5, 5, 5], [2, 2, 2]],
    "heads differ": [[5, 2, 7], [1, 8, 4]],
    "heads without an entry": [[5, 0, 3], [0, 0, 2]],
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def draw(counts, dtype, room=6):
    """Return slots with as many entries of each head, and the entries, `[key, value]` each."""
    entries = [
        [[torch.randn(count, SIZE).to(dtype) for _ in "kv"] for count in heads] for heads in counts
    ]
    is_shared = any(len(set(heads)) > 1 for heads in counts)
    largest = max(max(heads) for heads in counts) + room
    num_slots = max(sum(heads) + HEADS * room for heads in counts) if is_shared else largest
    rows = 1 if is_shared else HEADS
    keys, values = (torch.randn(len(counts), rows, num_slots, SIZE).to(dtype) for _ in "kv")
    positions = torch.full((len(counts), rows, num_slots), -1, dtype=torch.int32)
    head_of_slot = torch.full((len(counts), 1, num_slots), 255, dtype=torch.uint8)
    free = torch.zeros(len(counts), HEADS, dtype=torch.int64)
    for sequence, heads in enumerate(counts):
        start = 0
        for head, count in enumerate(heads):
            row = 0 if is_shared else head
            at = slice(start, start + count)
            keys[sequence, row, at], values[sequence, row, at] = entries[sequence][head]
            positions[sequence, row, at] = torch.arange(count, dtype=torch.int32)
            free[sequence, head] = start + count
            if is_shared:
                head_of_slot[sequence, 0, start : start + count + room] = head
                start += count + room
    free = free.view(len(counts), *((1, HEADS) if is_shared else (HEADS, 1)))
    seen = torch.tensor([max(heads) for heads in counts])
    scores = torch.zeros(positions.shape)
    slots = Slots(keys, values, scores, positions, free, seen)
    slots.head_of_slot = head_of_slot if is_shared else None
    return slots, entries


def expected_output(query, entries, scale, softcap, sink_logits):
    output = torch.zeros(*query.shape[:3], SIZE, dtype=torch.float64)
    sums = {}
    for sequence in range(len(query)):
        for head in range(HEADS * GROUPS):
            key, value = (t.double() for t in entries[sequence][head // GROUPS])
            logits = key @ query[sequence, head, 0].double() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            total = logits.exp().sum()
            if sink_logits is not None:
                total = total + sink_logits[head].double().exp()
            weights = logits.exp() / total
            output[sequence, head, 0] = weights @ value
            name = sequence, head // GROUPS
            sums[name] = sums.get(name, 0) + weights
    return output, sums


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}, {"adds": True}])
def test_steps_equal_the_formula(counts, dtype, options):
    check(append_step, counts, dtype, **options)


@pytest.mark.parametrize("counts", ["heads differ", "heads without an entry"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_heads_that_read_alone_equal_the_formula(counts, dtype, monkeypatch):
    """As they do where a product of all heads with the row of all would take longer."""
    monkeypatch.setattr(append, "_WASTED_PRODUCTS", -1)
    monkeypatch.setattr(append, "_attend", None)
    monkeypatch.setattr(append, "_SHAPE_STEP", 4)  # less than a head's slots, and than a row's
    check(append_step, counts, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 64])
def test_threads_share_the_slots_of_heads_that_read_alone(dtype, num_threads, monkeypatch):
    monkeypatch.setattr(append, "_WASTED_PRODUCTS", -1)
    monkeypatch.setattr(append, "_SHARE_STEP", 4)
    monkeypatch.setattr(append.torch, "get_num_threads", lambda: num_threads)
    check(append_step, [[70, 40, 91], [50, 38, 64]], dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("garbage")
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}, {"adds": True}])
def test_steps_of_kernels_equal_the_formula(counts, dtype, options):
    check(triton_decode.decode_step, counts, dtype, **options)


def check(step, counts, dtype, softcap=None, sinks=False, adds=False):
    is_even, counts = counts == "heads and sequences alike", COUNTS.get(str(counts), counts)
    slots, entries = draw(counts, dtype)
    sinks, scale = torch.randn(HEADS * GROUPS) if sinks else None, 0.4
    spec, span = AttentionSpec(scale, softcap, sinks), 4
    ring = QueryRing(torch.randn(2, HEADS, span, SIZE).to(dtype), torch.full((2, span), -1), None)
    expected_queries, expected_positions = ring.queries.clone(), ring.positions.clone()
    rules = StepRules(spec, torch.zeros(2, 1, 1), evicts=False, adds=adds, columns=torch.tensor(3))
    tail, totals = Tail.of(slots), {}
    assert tail.steps == 6
    assert (tail.end is not None) == is_even
    for number in range(6):
        query = torch.randn(2, HEADS * GROUPS, 1, SIZE).to(dtype)
        key, value = (torch.randn(2, HEADS, 1, SIZE).to(dtype) for _ in "kv")
        for sequence in range(2):
            for head in range(HEADS):
                new = key[sequence, head], value[sequence, head]
                pair = zip(entries[sequence][head], new, strict=True)
                entries[sequence][head] = [torch.cat(states) for states in pair]
        placed = torch.tensor([number + 50, 9][: 1 + number % 2])
        rules = rules._replace(ring=ring._replace(placed=placed))
        for sequence, heads in enumerate(counts):
            column = (max(heads) + number) % span
            means = query[sequence, :, 0].unflatten(0, (HEADS, -1)).mean(1)
            expected_queries[sequence, :, column] = means
            expected_positions[sequence, column] = placed[sequence % len(placed)]
        last = (tail,) if step is append_step else ()
        output = step(query, key, value, slots, rules, *last)
        if last:
            finish_steps([Appended(query, key, slots, rules, tail)])
            tail.note_step()
        expected, sums = expected_output(query, entries, scale, softcap, sinks)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
        for name, added in sums.items():
            before = totals.get(name, added.new_zeros(0))
            totals[name] = added + torch.nn.functional.pad(before, (0, len(added) - len(before)))
    assert tail.steps == (0 if step is append_step else 6)
    assert rules.columns == 9
    torch.testing.assert_close(ring.queries, expected_queries, atol=tolerance, rtol=tolerance)
    assert torch.equal(ring.positions, expected_positions)
    for (sequence, head), total in totals.items():
        row = 0 if slots.head_of_slot is not None else head
        of_head = slots.positions[sequence, row] >= 0
        if slots.head_of_slot is not None:
            of_head &= slots.head_of_slot[sequence, 0] == head
        scores = slots.scores[sequence, row][of_head].double()
        expected = total if adds else torch.zeros_like(total)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-4)
        length = len(total) - 6
        seen = max(counts[sequence])
        positions = [*range(length), *range(seen, seen + 6)]
        assert slots.positions[sequence, row][of_head].tolist() == positions
    assert slots.num_real_tokens.tolist() == [max(heads) + 6 for heads in counts]


@pytest.mark.parametrize("counts", COUNTS)
def test_slots_that_are_not_in_order_have_no_tail(counts):
    slots, _ = draw(COUNTS[counts], torch.float32)
    slots.positions[0, 0, 0] = -1
    assert Tail.of(slots) is None


def test_full_slots_leave_no_step():
    slots, _ = draw(COUNTS["heads differ"], torch.float32, room=1)
    assert Tail.of(slots).steps == 1
    slots, _ = draw(COUNTS["sequences differ"], torch.float32, room=1)
    assert Tail.of(slots).steps == 1
