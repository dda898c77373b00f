"""The end of a decode step of many layers at once: positions, and which slot is free next.

A step of one sequence takes as long as its operations are many, not as they are large; on a CPU
the last layer of a cache therefore ends the step of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2okv.ops.decode import (
    BEHIND_ALL,
    NOBODY,
    Slots,
    StepRules,
    evict_one,
    is_number,
    protected_entries,
    write_position,
)

_MOVED = ("positions", "free_slot", "num_real_tokens")


def evict_together(layers: Sequence[Slots], rules: StepRules) -> None:
    """Ends the deferred steps of many layers that are alike with the operations of one.

    Args:
        layers: what each holds, all of one shape, full, without owners; positions, free slots and
            the numbers of tokens are mutated.
        rules: those of any of them: they protect the same entries.
    """

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(own, name) for own in layers])

    parts = [joined(name) for name in ("scores", *_MOVED)]
    whole = Slots(layers[0].keys, layers[0].values, *parts)
    write_position(whole, None)
    whole.num_real_tokens.add_(1)
    copies = (len(layers), 1, 1)
    sink = None if rules.sink is None else rules.sink.repeat(copies)
    evict_one(whole, rules._replace(recent=rules.recent.repeat(copies), sink=sink), full=True)
    for name in _MOVED:
        own = [getattr(each, name) for each in layers]
        torch._foreach_copy_(own, list(getattr(whole, name).split(len(own[0]))))


class Segments:
    """Where the slots of each head are, if those of many layers stand one behind the other."""

    def __init__(self, layers: Sequence[Slots]) -> None:
        self._owners = [own.owner for own in layers]
        self.shapes = [own.positions.shape for own in layers]
        numbers, sequences, starts, free_sequences = [], [], [], []
        count = end = 0
        for layer, (batch, rows, num_slots) in zip(layers, self.shapes, strict=True):
            heads = layer.free_slot.numel() // batch
            row = torch.arange(batch).view(-1, 1, 1)
            head = torch.arange(heads).view(1, -1, 1) if layer.owner is None else layer.owner.long()
            own = (count + row * heads + head).expand(batch, rows, num_slots)
            if layer.owner is not None:
                own = own.masked_fill(layer.owner == NOBODY, -1)
            numbers.append(own.flatten())
            sequences.append(row.expand(batch, rows, num_slots).flatten())
            first = end + num_slots * torch.arange(batch * rows).view(batch, rows, 1)
            starts.append(first.expand(batch, rows, heads // rows).flatten())
            free_sequences.append(row.expand(batch, heads, 1).flatten())
            count, end = count + batch * heads, end + batch * rows * num_slots
        of_slots = torch.cat(numbers)
        self.has_spare = bool((of_slots < 0).any())
        self.count = count  # of heads; what is nobody's comes behind them
        self.of_slots = of_slots.masked_fill_(of_slots < 0, count)
        self.sequences, self.free_sequences = torch.cat(sequences), torch.cat(free_sequences)
        self.starts = torch.cat(starts)  # of each head's row

    def fits(self, layers: Sequence[Slots]) -> bool:
        """Whether they are those of these layers, as these are now."""
        return self.shapes == [own.positions.shape for own in layers] and all(
            one.owner is other for one, other in zip(layers, self._owners, strict=True)
        )

    def least(self, values: Tensor, start: float) -> Tensor:
        """The least of each head's values, one for each slot; ``[count + 1]``."""
        found = values.new_full((self.count + 1,), start)
        return found.scatter_reduce_(0, self.of_slots, values, "amin")


def evict_segments(layers: Sequence[Slots], rules: StepRules, segments: Segments) -> None:
    """As `evict_together` for layers, or heads, that hold different numbers of entries.

    Args:
        layers: what each holds, full; mutated likewise.
        rules: those of any of them: they protect the same entries.
        segments: made of these layers.
    """

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(own, name).flatten() for own in layers])

    newest = layers[0].num_real_tokens  # the position of the new token
    positions, free = joined("positions"), joined("free_slot").add_(segments.starts)
    newest, recent, sink = newest.view(-1, 1, 1), rules.recent, rules.sink
    if is_number(newest):
        positions.index_fill_(0, free, int(newest))
    else:
        own = newest.flatten().to(positions.dtype)
        positions.index_copy_(0, free, own.index_select(0, segments.free_sequences))
        newest, recent, sink = (
            None if part is None else part.flatten()[segments.sequences].view(1, 1, -1)
            for part in (newest, recent, sink)
        )
    rank, places = joined("scores"), positions.view(1, 1, -1)
    if rules.priority is not None:
        rank = rules.priority(rank.view(1, 1, -1), places, newest).flatten()
    protected = protected_entries(places, newest, sink, recent).flatten()
    rank = rank.masked_fill(protected, torch.inf)
    lowest = segments.least(rank, torch.inf).index_select(0, segments.of_slots)
    age = torch.add(positions, rank > lowest, alpha=BEHIND_ALL)
    oldest = segments.least(age, torch.iinfo(age.dtype).max)
    if segments.has_spare:
        oldest[-1] = -2  # which no slot has
    # Slots of a head stand together, and no two of its entries have one position.
    chosen = (age == oldest.index_select(0, segments.of_slots)).nonzero().flatten()
    positions.index_fill_(0, chosen, -1)
    for name, whole in (("positions", positions), ("free_slot", chosen.sub_(segments.starts))):
        own_parts = [getattr(each, name).view(-1) for each in layers]
        torch._foreach_copy_(own_parts, list(whole.split([len(own) for own in own_parts])))
    torch._foreach_add_([own.num_real_tokens for own in layers], 1)
