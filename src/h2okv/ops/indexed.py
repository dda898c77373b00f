"""Entries that are read and written where they lie, in blocks that a server hands out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes of a block up to which one product of copies is quicker than a product for each block.
_SMALL_BLOCK = 1 << 17
# Numbers of values up to which a CPU converts them to fp32 before a product of bf16 has begun.
_FEW_VALUES = 1 << 16


def mix_values(weights: Tensor, values: Tensor) -> Tensor:
    """Sum ``[rows, G, D]`` of values ``[rows, S, D]`` by weights ``[rows, G, S]``, fp32 or fp64."""
    if values.is_cpu and values.numel() <= _FEW_VALUES:
        return torch.bmm(weights, values.to(weights.dtype)).to(values.dtype)
    return torch.bmm(weights.to(values.dtype), values)


class Indexed(NamedTuple):
    """Entries ``[B, H, S, D]`` in blocks of a pool; to gather large ones would take longer."""

    blocks: Tensor  # [N, H, S, D]; a block is contiguous, the blocks may lie apart
    block_index: Tensor  # int64 [B], each sequence's block
    numbers: Sequence[int] | None = None  # the same for the host, which else has to read it

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.block_index), *self.blocks.shape[1:]))

    def write(self, free: Tensor, entry: Tensor) -> None:
        """Write an entry ``[B, H, 1, D]`` into each free slot, int64 ``[B, H, 1]``; mutates.

        Of slots that heads share (blocks are ``[N, 1, S, D]``) the free ones are ``[B, 1, H]``.
        """
        rows = torch.arange(free.shape[1], device=free.device).unsqueeze(-1)
        entries = entry.view(*free.shape, -1)
        self.blocks[self.block_index.view(-1, 1, 1), rows, free] = entries

    def logits(self, query: Tensor) -> Tensor:
        """Products ``[B * H, G, S]`` of queries ``[B * H, G, D]``, fp32 or fp64, and all keys."""
        if self._copies:
            keys = self.blocks.index_select(0, self.block_index).to(query.dtype).flatten(0, 1)
            return torch.bmm(query, keys.transpose(1, 2))
        batch, heads, num_slots, _ = self.shape
        queries = query.unflatten(0, (batch, heads))
        logits = query.new_empty(batch, heads, query.shape[1], num_slots)
        for sequence, block in enumerate(self._numbers):
            keys = self.blocks[block].to(query.dtype).transpose(1, 2)
            torch.bmm(queries[sequence], keys, out=logits[sequence])
        return logits.flatten(0, 1)

    def mix(self, weights: Tensor) -> Tensor:
        """Sum ``[B * H, G, D]`` of all values, by weights ``[B * H, G, S]``."""
        if self._copies:
            return mix_values(weights, self.blocks.index_select(0, self.block_index).flatten(0, 1))
        batch, heads, _, size = self.shape
        grouped = weights.to(self.blocks.dtype).unflatten(0, (batch, heads))
        output = grouped.new_empty(batch, heads, weights.shape[1], size)
        for sequence, block in enumerate(self._numbers):
            torch.bmm(grouped[sequence], self.blocks[block], out=output[sequence])
        return output.flatten(0, 1)

    @property
    def _numbers(self) -> Sequence[int]:
        numbers: Sequence[int] = self.block_index.tolist() if self.numbers is None else self.numbers
        return numbers

    @property
    def _copies(self) -> bool:
        """Whether all sequences' entries are copied for one product, which no host directs."""
        if torch.compiler.is_compiling() or not self.blocks.is_cpu:
            return True
        return self.blocks[0].numel() * self.blocks.element_size() <= _SMALL_BLOCK
