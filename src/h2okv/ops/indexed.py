"""Entries that are read and written where they lie, in blocks that a server hands out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Indexed(NamedTuple):
    """Entries ``[B, H, S, D]`` in blocks of a pool; a gather would copy all for every token."""

    blocks: Tensor  # [N, H, S, D]; a block is contiguous, the blocks may lie apart
    places: Tensor  # int64 [B], each sequence's block

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.places), *self.blocks.shape[1:]))

    def write(self, free: Tensor, entry: Tensor) -> None:
        """Writes an entry ``[B, H, 1, D]`` into each free slot, int64 ``[B, H, 1]``; mutates."""
        heads = torch.arange(free.shape[1], device=free.device)
        self.blocks[self.places.unsqueeze(1), heads, free.squeeze(2)] = entry.squeeze(2)

    def logits(self, query: Tensor) -> Tensor:
        """Products ``[B * H, G, S]`` of fp32 queries ``[B * H, G, D]`` and all keys."""
        batch, heads, num_slots, _ = self.shape
        queries = query.unflatten(0, (batch, heads))
        logits = query.new_empty(batch, heads, query.shape[1], num_slots)
        for sequence, block in enumerate(self.places.tolist()):
            keys = self.blocks[block].float().transpose(1, 2)
            torch.bmm(queries[sequence], keys, out=logits[sequence])
        return logits.flatten(0, 1)

    def mix(self, weights: Tensor) -> Tensor:
        """Sums ``[B * H, G, D]`` of all values, by fp32 weights ``[B * H, G, S]``."""
        batch, heads, _, size = self.shape
        grouped = weights.to(self.blocks.dtype).unflatten(0, (batch, heads))
        output = grouped.new_empty(batch, heads, weights.shape[1], size)
        for sequence, block in enumerate(self.places.tolist()):
            torch.bmm(grouped[sequence], self.blocks[block], out=output[sequence])
        return output.flatten(0, 1)
