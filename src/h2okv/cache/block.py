"""What a layer reads at a time: new tokens, and the entries that they attend to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """New tokens of one layer, and how they are attended to."""

    query: Tensor  # [B, HQ, T, D]
    key: Tensor  # [B, H, T, D]
    value: Tensor  # [B, H, T, Dv]
    real: Tensor | None  # bool [B, T], False for padding; None if there is none
    undo: Tensor | None  # fp32 [B or 1, 1, T, R / 2, 2], rotates back; None where keys stay rotated
    position_ids: Tensor | None  # int [B or 1, 1, T, 1], where the model put them, if a rule asks
    scale: float
    softcap: float | None

    @property
    def length(self) -> int:
        """T, padding included."""
        return self.query.shape[2]

    def counts(self) -> Tensor | int:
        """Return the real tokens of each sequence, int64 ``[B]``, or T for all."""
        return self.length if self.real is None else self.real.sum(dim=1)

    def split(self, chunk: int) -> Iterator[tuple[tuple[Any, Any], Block]]:
        """Yield smaller blocks and their ``[B, T]`` index, each sequence cut as if alone."""
        batch, device = self.query.shape[0], self.query.device
        if self.real is None:
            for start in range(0, self.length, chunk):
                index = (slice(None), slice(start, start + chunk))
                yield index, self._take(index, None)
            return
        # Real tokens first, in their order: shorter sequences get padding in the last blocks.
        columns = (~self.real).to(torch.uint8).argsort(dim=1, stable=True)
        longest = int(self.real.sum(dim=1).max())
        sequences = torch.arange(batch, device=device).unsqueeze(1)
        for chunk_columns in columns[:, :longest].split(chunk, dim=1):
            real = self.real.gather(1, chunk_columns)
            at = sequences, chunk_columns
            yield at, self._take(at, None if real.all() else real)

    def _take(self, index: tuple[Any, Any], real: Tensor | None) -> Block:
        """Return the columns of an index in ``[B, T, ...]``: a view if that is of slices."""

        def take(states: Tensor) -> Tensor:
            expanded = states.expand(self.query.shape[0], *states.shape[1:])
            return expanded.transpose(1, 2)[index].transpose(1, 2)

        query, key, value = take(self.query), take(self.key), take(self.value)
        undo, position_ids = (
            None if tensor is None else take(tensor) for tensor in (self.undo, self.position_ids)
        )
        return Block(query, key, value, real, undo, position_ids, self.scale, self.softcap)


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
