"""The decode step between two cuts: write the entry behind the others and attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from h2okv.ops.attention import mean_queries
from h2okv.ops.decode import (
    Slots,
    StepRules,
    decode_with_scores,
    keep_query,
    write_position,
    write_weight,
)
from h2okv.ops.reference import AttentionSpec

# Slots by which the products of a step grow, in dtypes of fewer bits than fp32: each new shape
# costs their library more than the product itself.
_SHAPE_STEP = 64
# One product of all query heads with a row that H heads share computes H times what they need. Each
# head reads its own slots where that wastes more than this many products of numbers a head, which
# take a core as long as one more call.
_WASTED_PRODUCTS = 320_000
# A head's slots are divided among n threads where each gets n times this many or more. Lengths are
# rounded up by less than one share, so that every share has an entry.
_SHARE_STEP = 64


@dataclass
class Tail:
    """The next slots of all heads, where every head takes its slots in their order.

    A step that uses it looks for nothing; one that does not makes it invalid.
    """

    positions: Tensor  # those of the slots, whose place other tensors may take
    steps: int  # tokens that still find a slot
    free: Tensor  # int64 [B * H], the next slot of each head, among the slots of all rows
    end: int | None  # slots in use of each row; None where rows or their heads differ
    # Added to the logits of queries, [B, H, 1, S] or, of shared slots, [B, 1, HQ, S]: 0 for the
    # entries, -inf for other slots. Made by the first step that needs it.
    bias: Tensor | None = None
    free_bias: Tensor | None = None  # int64, where it becomes 0 next
    # Of heads that share rows on a CPU: the first slot of each head of each sequence, and the one
    # behind its entries `num_steps` steps ago.
    segments: list[tuple[int, int]] | None = None
    num_steps: int = 0

    @classmethod
    def of(cls, slots: Slots, former: Tail | None = None) -> Tail | None:
        """Look for the tail of unpacked slots; waits for the device.

        Args:
            slots: whose.
            former: a tail of the same slots, whose tensors are filled again and keep their
                addresses; mutated.

        Returns:
            ``None`` where a head does not have its entries in its first slots. Steps that add
            their probabilities need scores of 0 in the slots behind them.
        """
        batch, rows, num_slots = slots.positions.shape
        index = torch.arange(num_slots, device=slots.positions.device)
        of_head = torch.ones_like(index, dtype=torch.bool)
        free = slots.free_slot.view(batch, -1, 1)
        if slots.head_of_slot is not None:
            of_head = ~slots.of_others()
        is_entry = of_head & (slots.positions >= 0)
        room = (of_head & (index >= free)).sum(dim=-1)
        ends = free.amin(), free.amax(), room.amin(), (is_entry == (of_head & (index < free))).all()
        first, last, steps, is_in_order = torch.stack([end.long() for end in ends]).tolist()
        if not is_in_order:
            return None
        starts = torch.arange(0, batch * rows * num_slots, num_slots, device=index.device)
        flat = (starts.view(batch, rows, 1) + slots.free_slot).flatten()
        end = first if first == last and rows == free.shape[1] else None
        tail = cls(slots.positions, steps, flat, end, segments=_segments(slots, of_head))
        if former is not None and former.is_of(slots) and former.free.shape == flat.shape:
            former.steps, former.end = steps, end
            former.segments, former.num_steps = tail.segments, 0
            former.free.copy_(flat)
            former._fill_again(slots)
            return former
        return tail

    def is_of(self, slots: Slots) -> bool:
        """Tell whether the slots still have the tensors of which this is the tail."""
        return slots.positions is self.positions

    def bias_of(self, slots: Slots, query: Tensor) -> Tensor:
        """Return the bias for queries ``[B, HQ, 1, D]``; mutates the tail."""
        if self.bias is None or self.bias.dtype != query.dtype:
            with torch.inference_mode(False):
                hidden, free_bias = self._hidden(slots, query.shape[1])
                self.bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
                self.bias.masked_fill_(hidden, -torch.inf)
                self.free_bias = free_bias
        return self.bias

    def _fill_again(self, slots: Slots) -> None:
        if self.bias is None or self.free_bias is None:
            return
        num_heads = self.bias.shape[2] if slots.head_of_slot is not None else self.bias.shape[1]
        hidden, free_bias = self._hidden(slots, num_heads)
        self.bias.zero_().masked_fill_(hidden, -torch.inf)
        if self.free_bias is not self.free:
            self.free_bias.copy_(free_bias)

    def _hidden(self, slots: Slots, num_heads: int) -> tuple[Tensor, Tensor]:
        """Return which places of the bias hide a slot, and `free_bias`."""
        hidden = slots.positions < 0
        if slots.head_of_slot is None:
            return hidden.unsqueeze(2), self.free
        groups = num_heads // slots.free_slot.shape[-1]
        hidden = (hidden | slots.of_others()).repeat_interleave(groups, dim=1).unsqueeze(1)
        free = slots.free_slot.view(len(hidden), -1, 1).expand(-1, -1, groups)
        rows = torch.arange(free.numel(), device=free.device) * slots.positions.shape[2]
        return hidden, rows + free.flatten()

    def counters(self, slots: Slots) -> list[Tensor]:
        """Return what counts steps on the device."""
        counters = [self.free, slots.free_slot, slots.num_real_tokens]
        if self.free_bias is not None and self.free_bias is not self.free:
            counters.append(self.free_bias)
        return counters

    def note_step(self) -> None:
        """Note on the host what the device has counted; mutates the tail."""
        self.steps -= 1
        self.num_steps += 1
        if self.end is not None:
            self.end += 1


def _segments(slots: Slots, of_head: Tensor) -> list[tuple[int, int]] | None:
    """Return `Tail.segments`, where bool `of_head`, ``[B, H, S]``, marks the slots of each head."""
    if slots.head_of_slot is None or slots.positions.device.type != "cpu":
        return None
    firsts = of_head.to(torch.uint8).argmax(dim=-1).flatten().tolist()
    return list(zip(firsts, slots.free_slot.flatten().tolist(), strict=True))


class Appended(NamedTuple):
    """A step that has appended and attended, and what `finish_steps` needs of it."""

    query: Tensor
    key: Tensor
    slots: Slots
    rules: StepRules
    tail: Tail


def append_step(
    query: Tensor, key: Tensor, value: Tensor, slots: Slots, rules: StepRules, tail: Tail
) -> Tensor:
    """Run one token of each sequence, none of them padding, through slots that have room for it.

    `finish_steps` must follow before anything else reads the slots.

    Args:
        query: ``[B, HQ, 1, D]``.
        key: ``[B, H, 1, D]``.
        value: ``[B, H, 1, Dv]``.
        slots: the cached entries; mutated.
        rules: of which the step reads `spec`, `adds` and `numbers`.
        tail: that of the slots; its bias is mutated.

    Returns:
        ``[B, HQ, 1, Dv]`` in the values' dtype.
    """
    assert isinstance(slots.keys, Tensor)
    assert isinstance(slots.values, Tensor)
    spec = rules.spec
    write_weight(slots, rules, value)
    slots.keys.view(-1, key.shape[-1]).index_copy_(0, tail.free, key.reshape(-1, key.shape[-1]))
    if slots.has_values:
        value_size = value.shape[-1]
        slots.values.view(-1, value_size).index_copy_(0, tail.free, value.reshape(-1, value_size))
    write_position(slots, rules.numbers, None)
    if rules.adds or spec.softcap is not None or spec.sinks is not None:
        return _attend_and_add(query, slots, rules, tail)
    if tail.segments is not None and _reads_alone(query, slots):
        return _attend_by_segments(query, slots, spec, tail)
    return _attend(query, slots, spec, tail)


def finish_steps(steps: Sequence[Appended]) -> None:
    """Keep the queries of steps and count them on the device; mutates slots, rings and tails.

    Those of all layers together: it is the number of operations that takes time.
    """
    alike: dict[Any, list[Appended]] = {}
    counters = []
    for step in steps:
        query, key, slots, rules, tail = step
        counters += tail.counters(slots)
        if rules.columns is not None:
            counters.append(rules.columns)
        if rules.ring is None:
            continue
        span, numbers = rules.ring.queries.shape[2], rules.numbers
        if numbers is None or len(steps) == 1:
            keep_query(query, key, slots, rules)
            continue
        kind = query.shape, query.dtype, query.device, key.shape[1], span, numbers.newest
        alike.setdefault(kind, []).append(step)
    for (*_, num_kv_heads, span, newest), group in alike.items():
        column, rings = newest % span, [step.rules.ring for step in group if step.rules.ring]
        means = mean_queries(torch.cat([step.query for step in group]), num_kv_heads).squeeze(2)
        columns = [ring.queries.select(2, column) for ring in rings]
        torch._foreach_copy_(columns, means.chunk(len(group)))
        for ring in rings:
            if ring.positions is not None:
                ring.positions[:, column] = 0 if ring.placed is None else ring.placed
    torch._foreach_add_(counters, 1)


def _extent(slots: Slots, tail: Tail, itemsize: int) -> tuple[int, bool]:
    """Return the slots of a row that a step reads, and whether all of them are entries."""
    num_slots = slots.positions.shape[2]
    if tail.end is None:
        return num_slots, False
    end = tail.end + 1
    if itemsize < 4:
        end = min(-(-end // _SHAPE_STEP) * _SHAPE_STEP, num_slots)
    return end, end == tail.end + 1


def _read(slots: Slots, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of some slots of all rows."""
    assert isinstance(slots.keys, Tensor)
    assert isinstance(slots.values, Tensor)
    return slots.keys.narrow(2, start, length), slots.values.narrow(2, start, length)


def _attend_and_add(query: Tensor, slots: Slots, rules: StepRules, tail: Tail) -> Tensor:
    """Attend by single operations, which add the probabilities to the scores where rules say so."""
    end, is_even = _extent(slots, tail, query.dtype.itemsize)
    hidden = None if is_even else slots.positions.narrow(2, 0, end) < 0
    if slots.head_of_slot is not None and hidden is not None:
        hidden = hidden | slots.of_others()
    scores = slots.scores.narrow(2, 0, end) if rules.adds else None
    keys, values = _read(slots, 0, end)
    return decode_with_scores(query, keys, values, hidden, rules.spec, None, scores)[0]


def _attend(query: Tensor, slots: Slots, spec: AttentionSpec, tail: Tail) -> Tensor:
    """Attend to whole rows, masked where they have more than entries."""
    end, is_even = _extent(slots, tail, query.dtype.itemsize)
    keys, values = _read(slots, 0, end)
    bias = None if is_even else _open_bias(query, slots, tail).narrow(-1, 0, end)
    # The query heads of a row as several tokens, which all see the same slots.
    rows = query.reshape(*keys.shape[:2], -1, query.shape[-1])
    output = scaled_dot_product_attention(rows, keys, values, bias, scale=spec.scale)
    return output.reshape(*query.shape[:3], -1)


def _open_bias(query: Tensor, slots: Slots, tail: Tail) -> Tensor:
    """Return the bias of a tail with the new tokens' slots open; mutates the tail."""
    bias = tail.bias_of(slots, query)
    if tail.free_bias is not None:
        bias.view(-1).index_fill_(0, tail.free_bias, 0.0)
    return bias


def _reads_alone(query: Tensor, slots: Slots) -> bool:
    """Tell whether one product for each head takes less time than one for all."""
    num_heads, num_kv_heads, size = query.shape[1], slots.free_slot.shape[-1], query.shape[-1]
    wasted = num_heads * size * slots.positions.shape[2] * (num_kv_heads - 1) // num_kv_heads
    return wasted > _WASTED_PRODUCTS * num_kv_heads


def _attend_by_segments(query: Tensor, slots: Slots, spec: AttentionSpec, tail: Tail) -> Tensor:
    """Attend with each head of each sequence to its own slots of a row, shared among threads."""
    assert tail.segments is not None
    batch, num_heads, _, size = query.shape
    num_kv_heads, num_slots = len(tail.segments) // batch, slots.positions.shape[2]
    groups = num_heads // num_kv_heads
    lengths = [stop + tail.num_steps + 1 - start for start, stop in tail.segments]
    shares = min(torch.get_num_threads(), isqrt(min(lengths) // _SHARE_STEP)) or 1
    step = shares * _SHARE_STEP
    if shares == 1 or slots.values.shape[-1] != size:
        shares, step = 1, _SHAPE_STEP if query.dtype.itemsize < 4 else 1
    bias = None
    if step > 1:
        bias = _open_bias(query, slots, tail).view(batch, num_kv_heads, groups, num_slots)
    rows = query.reshape(batch * num_kv_heads, 1, groups, size)
    outputs, log_sums = [], []
    for number, ((start, _), length) in enumerate(zip(tail.segments, lengths, strict=True)):
        sequence, head = divmod(number, num_kv_heads)
        length = min(-(-length // step) * step, num_slots)
        start = min(start, num_slots - length)  # the mask hides other heads' slots
        key, value = (
            states[sequence, 0].unflatten(0, (shares, 1, -1))
            for states in _read(slots, start, length)
        )
        mask = None
        if bias is not None:
            mask = bias[sequence, head].narrow(-1, start, length)
            mask = mask.unflatten(-1, (shares, 1, -1)).permute(1, 2, 0, 3)
        options: Any = {"attn_mask": mask, "scale": spec.scale}
        states = rows[number].expand(shares, 1, -1, -1), key, value
        if shares == 1:
            outputs.append(scaled_dot_product_attention(*states, **options))
            continue
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *states, **options
        )
        outputs.append(output)
        log_sums.append(log_sum)
    output = torch.stack(outputs)
    if log_sums:
        weights = torch.stack(log_sums).softmax(dim=1).unsqueeze(-1)
        output = (output * weights).sum(dim=1).to(query.dtype)
    return output.reshape(batch, num_heads, 1, -1)
