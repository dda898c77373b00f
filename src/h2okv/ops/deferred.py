"""The end of a decode step of many layers at once: positions, and which slot is free next.

A step of one sequence takes as long as its operations are many, not as they are large; on a CPU
the last layer of a cache therefore ends the step of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2okv.ops.choice import is_number, protected_entries
from h2okv.ops.compaction import NO_HEAD
from h2okv.ops.decode import BEHIND_ALL, Slots, StepRules, evict_one, write_position

_MOVED = ("positions", "free_slot", "num_real_tokens")


def evict_together(layers: Sequence[Slots], rules: StepRules) -> None:
    """End the deferred steps of many layers that are alike with the operations of one.

    Args:
        layers: what each holds, all of one shape, full, without owners; positions, free slots and
            the numbers of tokens are mutated.
        rules: those of any of them: they protect the same entries.
    """

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(state, name) for state in layers])

    joined_tensors = [joined(name) for name in ("scores", *_MOVED)]
    joined_slots = Slots(layers[0].keys, layers[0].values, *joined_tensors)
    write_position(joined_slots, None)
    joined_slots.num_real_tokens.add_(1)
    copies = (len(layers), 1, 1)
    sink = None if rules.sink is None else rules.sink.repeat(copies)
    evict_one(
        joined_slots, rules._replace(recent=rules.recent.repeat(copies), sink=sink), full=True
    )
    for name in _MOVED:
        fields = [getattr(state, name) for state in layers]
        torch._foreach_copy_(fields, list(getattr(joined_slots, name).split(len(fields[0]))))


class Segments:
    """Where the slots of each head are, if those of many layers stand one behind the other.

    Of each sequence there is a row of all its slots, layer by layer and head by head.
    """

    def __init__(self, layers: Sequence[Slots]) -> None:
        self._heads_of_slots = [slots.head_of_slot for slots in layers]
        self._shapes = [slots.positions.shape for slots in layers]
        numbers, starts = [], []
        count = end = 0
        for layer, (batch, rows, num_slots) in zip(layers, self._shapes, strict=True):
            heads = layer.free_slot.numel() // batch
            heads_of_layer = torch.arange(rows).view(-1, 1).expand(batch, rows, num_slots)
            if layer.head_of_slot is not None:
                heads_of_layer = layer.head_of_slot.long().masked_fill(
                    layer.head_of_slot == NO_HEAD, -1 - count
                )
            numbers.append((count + heads_of_layer).flatten(1))
            first = end + num_slots * torch.arange(rows)
            starts.append(first.repeat_interleave(heads // rows))
            count, end = count + heads, end + rows * num_slots
        of_slots = torch.cat(numbers, dim=1)
        self.has_spare = bool((of_slots < 0).any())
        self.count = count  # of heads; unused slots come behind them
        of_slots.masked_fill_(of_slots < 0, count)
        if bool((of_slots == of_slots[:1]).all()):  # of sequences that are alike, one is kept
            of_slots = of_slots[:1].clone().expand_as(of_slots)
        self.of_slots = of_slots
        self.starts = torch.cat(starts)  # of each head's row of slots

    def fits(self, layers: Sequence[Slots]) -> bool:
        """Tell whether the segments are those of these layers as they are now."""
        return self._shapes == [slots.positions.shape for slots in layers] and all(
            layer.head_of_slot is other
            for layer, other in zip(layers, self._heads_of_slots, strict=True)
        )

    def least(self, values: Tensor, start: float) -> Tensor:
        """Return the least of each head's values ``[B, S]``, ``[B, count + 1]``."""
        minima = values.new_full((len(values), self.count + 1), start)
        return minima.scatter_reduce_(1, self.of_slots, values, "amin")

    def spread(self, values: Tensor) -> Tensor:
        """Return the value of each slot's head, ``[B, S]`` of ``[B, count + 1]``."""
        return values.gather(1, self.of_slots)


def evict_segments(layers: Sequence[Slots], rules: StepRules, segments: Segments) -> None:
    """End steps like `evict_together`, for layers or heads with different numbers of entries.

    Args:
        layers: what each holds, full; mutated likewise.
        rules: those of any of them: they protect the same entries.
        segments: made of these layers.
    """

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(slots, name).flatten(1) for slots in layers], dim=1)

    batch = len(layers[0].positions)
    newest = layers[0].num_real_tokens.view(-1, 1, 1)  # the position of the new token
    positions, free = joined("positions"), joined("free_slot").add_(segments.starts)
    if is_number(newest):
        positions.scatter_(1, free, int(newest))
    else:
        positions.scatter_(1, free, newest[:, 0].to(positions.dtype).expand_as(free))
    rank, position_row = joined("scores"), positions.unsqueeze(1)
    if rules.priority is not None:
        rank = rules.priority(rank.unsqueeze(1), position_row, newest).squeeze(1)
    protected = protected_entries(position_row, newest, rules.sink, rules.recent).squeeze(1)
    rank = rank.masked_fill(protected, torch.inf)
    lowest = segments.spread(segments.least(rank, torch.inf))
    age = torch.add(positions, rank > lowest, alpha=BEHIND_ALL)
    oldest = segments.least(age, torch.iinfo(age.dtype).max)
    if segments.has_spare:
        oldest[:, -1] = -2  # which no slot has
    # Slots of a head stand together, and no two of its entries have one position.
    chosen = (age == segments.spread(oldest)).nonzero()[:, 1].view(batch, -1)
    positions.scatter_(1, chosen, -1)
    for name, values in (("positions", positions), ("free_slot", chosen - segments.starts)):
        fields = [getattr(slots, name) for slots in layers]
        shares = values.split([field.numel() // batch for field in fields], dim=1)
        torch._foreach_copy_([field.flatten(1) for field in fields], list(shares))
    torch._foreach_add_([slots.num_real_tokens for slots in layers], 1)
