"""What a layer reads at a time: new tokens, and the entries that they attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2okv.cache.slot_state import SlotState
from h2okv.ops.reference import AttentionSpec


class Block(NamedTuple):
    """New tokens of one layer, and how they are attended to."""

    query: Tensor  # [B, HQ, T, D]
    key: Tensor  # [B, H, T, D]
    value: Tensor  # [B, H, T, Dv]
    real: Tensor | None  # bool [B, T], False for padding; None if there is none
    undo: Tensor | None  # fp32 [B or 1, 1, T, R / 2, 2], rotates back; None where keys stay rotated
    position_ids: Tensor | None  # int [B or 1, 1, T, 1], where the model put them, if a rule asks
    spec: AttentionSpec
    index: Any = None  # ``[B, T]`` index of its tokens in the block that was split
    is_late: Tensor | None = None  # bool [B], whether a cut has waited for the end of an image
    counted: tuple[int, ...] | None = None  # real tokens of each sequence, where the host has them
    is_inner: bool = False  # whether the next block of a forward follows, and is no step

    @property
    def length(self) -> int:
        """T, padding included."""
        return self.query.shape[2]

    @property
    def is_span(self) -> bool:
        """Whether the block has only the queries of a span that was read before."""
        return self.key is self.query

    def counts(self) -> Tensor | int:
        """Return the real tokens of each sequence, int64 ``[B]``, or T for all."""
        return self.length if self.real is None else self.real.sum(dim=1)

    def split(self, chunk: int, phases: Sequence[int] = ()) -> Iterator[Block]:
        """Yield smaller blocks, each sequence cut as if alone; `put` puts outputs together.

        Cuts are at multiples of `chunk`, with `phases` tokens of each sequence before this block. A
        cut inside an image waits for the image's end; those after it stay where they were.
        """
        if self.real is None and self.spec.reach is None and len(set(phases)) < 2:
            first = chunk - (phases[0] if phases else 0)
            for start, stop in pairwise([0, *range(first, self.length, chunk), self.length]):
                yield self._take((slice(None), slice(start, stop)), None)
            return
        batch, device = self.query.shape[0], self.query.device
        counts, columns, reach = [self.length] * batch, None, self.spec.reach
        if self.real is not None:
            # Real tokens first, in their order: shorter sequences get padding in the last blocks.
            columns = (~self.real).to(torch.uint8).argsort(dim=1, stable=True)
            counts = list(self.counted or self.real.sum(dim=1).tolist())
            if reach is not None:
                ranks = self.real.cumsum(dim=1) - 1
                reach = ranks.gather(1, reach.clamp(min=0)).gather(1, columns)
        reaches = [] if reach is None else reach.tolist()
        ends = [chunk - phase for phase in phases] or [chunk] * batch
        starts = [0] * batch
        sequences = torch.arange(batch, device=device).unsqueeze(1)
        while any(start < count for start, count in zip(starts, counts, strict=True)):
            stops = [
                max(start, min(pair)) for start, *pair in zip(starts, ends, counts, strict=True)
            ]
            late = None
            for row, reached in enumerate(reaches):
                if starts[row] < stops[row] <= reached[stops[row] - 1]:
                    late = torch.zeros(batch, dtype=torch.bool) if late is None else late
                    stops[row], late[row] = reached[stops[row] - 1] + 1, True
            widest = max(stop - start for start, stop in zip(starts, stops, strict=True))
            if not widest:  # the image before has passed this cut too
                ends = [end + chunk for end in ends]
                continue
            edges = torch.tensor([starts, stops], device="cpu").unsqueeze(-1)
            edges = edges.to(device, non_blocking=True)
            index = edges[0] + torch.arange(widest, device=device)
            real = index < edges[1]
            index = index.clamp(max=self.length - 1)
            block_reach = None if reach is None else reach.gather(1, index) - edges[0]
            index = index if columns is None else columns.gather(1, index)
            late = None if late is None else late.to(device)
            counted = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
            padding = None if min(counted) == widest else real
            yield self._take((sequences, index), padding, block_reach, late, counted)
            starts, ends = stops, [end + chunk for end in ends]

    def split_prompt(self, chunk: int, phases: Sequence[int] = ()) -> Iterator[Block]:
        """Yield smaller blocks as `split` does, those before others marked as inner."""
        before: Block | None = None
        for block in self.split(chunk, phases):
            if before is not None:
                yield before._replace(is_inner=block.length > 1)
            before = block
        if before is not None:
            yield before

    def of_others(self, is_left_out: Sequence[bool]) -> Block:
        """Return the block with the left-out sequences replaced by padding."""
        others = ~torch.tensor(is_left_out, device=self.query.device).unsqueeze(1)
        real = others.expand(-1, self.length) if self.real is None else self.real & others
        return self._replace(real=real)

    def columns(self, start: int, stop: int) -> Block:
        """Return the tokens of some columns as a block."""
        real = None if self.real is None else self.real[:, start:stop]
        return self._take(
            (slice(None), slice(start, stop)),
            None if real is None or real.all() else real,
            None if self.spec.reach is None else self.spec.reach[:, start:stop] - start,
        )

    def _take(
        self,
        index: tuple[Any, Any],
        real: Tensor | None,
        reach: Tensor | None = None,
        is_late: Tensor | None = None,
        counted: tuple[int, ...] | None = None,
    ) -> Block:
        """Index ``[B, T, ...]`` by columns: a view where the index is a slice."""

        def take(states: Tensor) -> Tensor:
            expanded = states.expand(self.query.shape[0], *states.shape[1:])
            return expanded.transpose(1, 2)[index].transpose(1, 2)

        query, key, value = take(self.query), take(self.key), take(self.value)
        undo, position_ids = (
            None if tensor is None else take(tensor) for tensor in (self.undo, self.position_ids)
        )
        spec = self.spec if reach is None else self.spec._replace(reach=reach)
        return Block(query, key, value, real, undo, position_ids, spec, index, is_late, counted)

    def put(self, result: Tensor, output: Tensor) -> None:
        """Copy the block's output to its tokens' places in the whole output; mutates `output`."""
        result, output = result.transpose(1, 2), output.transpose(1, 2)
        if self.real is None:
            output[self.index] = result
            return
        sequences, columns = self.index
        if isinstance(columns, slice):
            output[self.index] = result
            return
        sequences = sequences.expand_as(columns)[self.real]
        output[sequences, columns[self.real]] = result[self.real]


@dataclass
class BlockEntries:
    """The N = P + T entries of a block: those cached before, then the block's own tokens."""

    past: int  # P
    key: Tensor  # [B, H, N, D], as the cache has them and as the model gave them
    value: Tensor  # [B, H, N, Dv], likewise
    scores: Tensor  # fp32 [B, H, N], accumulated
    positions: Tensor  # int32 [B, H, N]; -1: no entry
    query: Tensor  # [B, HQ, T, D], rotated as `attended_key`
    attended_key: Tensor  # [B, H, N, D], as the block attends to them: rotated, or rounded
    attended_value: Tensor  # [B, H, N, Dv], likewise
    is_entry: Tensor | None = None  # bool [B, H, N]; None if all are

    def before_block(self) -> BlockEntries:
        """Return the entries that were cached before the block."""
        names = ("key", "value", "scores", "positions", "attended_key", "attended_value")
        before = {name: getattr(self, name)[:, :, : self.past] for name in names}
        is_entry = None if self.is_entry is None else self.is_entry[..., : self.past]
        return replace(self, **before, is_entry=is_entry)

    def metadata(self, state: SlotState) -> dict[str, Tensor]:
        """Return what moves with entries besides keys and values, ``[B, H, N]``, of the P cached.

        What these alone have is empty in the block's tokens.
        """
        num_entries, states = self.positions.shape[2], vars(self)
        return {
            name: states[name] if name in states else state.kinds[name].resized(tensor, num_entries)
            for name in state.moving
            if (tensor := getattr(state, name)) is not None
        }

    def of_sequences(self, indices: Tensor) -> BlockEntries:
        """Return the entries of sequences, int64 ``[B']``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        selected = {
            name: value[indices] for name, value in values.items() if torch.is_tensor(value)
        }
        return BlockEntries(**(values | selected))
