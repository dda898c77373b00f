"""The decode step between two cuts: write the entry behind the others and attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2okv.ops.decode import Slots, StepRules, decode_with_scores, keep_query, write_weight

# Slots by which the products of a step grow, in dtypes of fewer bits than fp32: each new shape
# costs their library more than the product itself.
_SHAPE_STEP = 64


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
        tail = cls(slots.positions, steps, flat, end)
        if former is not None and former.is_of(slots) and former.free.shape == flat.shape:
            former.steps, former.end = steps, end
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

    def advance(self, slots: Slots) -> None:
        """Count a step on the device; mutates the tail and the slots."""
        counters = [self.free, slots.free_slot, slots.num_real_tokens]
        if self.free_bias is not None and self.free_bias is not self.free:
            counters.append(self.free_bias)
        torch._foreach_add_(counters, 1)

    def note_step(self) -> None:
        """Note on the host what the device has counted; mutates the tail."""
        self.steps -= 1
        if self.end is not None:
            self.end += 1


def append_step(
    query: Tensor, key: Tensor, value: Tensor, slots: Slots, rules: StepRules, tail: Tail
) -> Tensor:
    """Run one token of each sequence, none of them padding, through slots that have room for it.

    Args:
        query: ``[B, HQ, 1, D]``.
        key: ``[B, H, 1, D]``.
        value: ``[B, H, 1, Dv]``.
        slots: the cached entries; mutated.
        rules: of which the step reads `spec`, `adds` and `numbers`.
        tail: that of the slots; mutated, but for `Tail.note_step`.

    Returns:
        ``[B, HQ, 1, Dv]`` in the values' dtype.
    """
    assert isinstance(slots.keys, Tensor)
    assert isinstance(slots.values, Tensor)
    spec = rules.spec
    keep_query(query, key, slots, rules)
    write_weight(slots, rules, value)
    slots.keys.view(-1, key.shape[-1]).index_copy_(0, tail.free, key.reshape(-1, key.shape[-1]))
    if slots.has_values:
        value_size = value.shape[-1]
        slots.values.view(-1, value_size).index_copy_(0, tail.free, value.reshape(-1, value_size))
    if rules.numbers is not None:
        slots.positions.view(-1).index_fill_(0, tail.free, rules.numbers.newest)
    else:
        position = slots.num_real_tokens.to(torch.int32).view(-1, 1, 1)
        slots.positions.scatter_(-1, slots.free_slot, position.expand_as(slots.free_slot))
    end, is_even = slots.positions.shape[2], tail.end is not None
    if tail.end is not None:
        end = tail.end + 1
        if value.dtype.itemsize < 4:
            end = min(-(-end // _SHAPE_STEP) * _SHAPE_STEP, slots.positions.shape[2])
            is_even = end == tail.end + 1
    keys, values = slots.keys.narrow(2, 0, end), slots.values.narrow(2, 0, end)
    if rules.adds or spec.softcap is not None or spec.sinks is not None:
        hidden = None if is_even else slots.positions.narrow(2, 0, end) < 0
        if slots.head_of_slot is not None and hidden is not None:
            hidden = hidden | slots.of_others()
        scores = slots.scores.narrow(2, 0, end) if rules.adds else None
        output, _ = decode_with_scores(query, keys, values, hidden, spec, None, scores)
    else:
        bias = None
        if not is_even:
            bias = tail.bias_of(slots, query)
            if tail.free_bias is not None:
                bias.view(-1).index_fill_(0, tail.free_bias, 0.0)
            bias = bias.narrow(-1, 0, end)
        # The query heads of a row as several tokens, which all see the same slots.
        rows = query.reshape(*keys.shape[:2], -1, query.shape[-1])
        output = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, values, bias, scale=spec.scale
        )
        output = output.reshape(*query.shape[:3], -1)
    tail.advance(slots)
    return output
