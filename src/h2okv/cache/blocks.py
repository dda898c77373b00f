"""A forward's new tokens, cut into the blocks of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """New tokens of one layer.

    Attributes:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, Dv]``.
        real: bool ``[B, T]``, False for padding; ``None`` if there is none.
        undo: fp32 ``[B or 1, 1, T, R / 2, 2]``, factors that turn queries and keys back; ``None``
            where they stay as the model turned them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    real: torch.Tensor | None
    undo: torch.Tensor | None


def split_block(block: Block, chunk: int) -> Iterator[tuple[torch.Tensor, Block]]:
    """Cuts a long block; every row by its own real tokens, whatever its padding.

    A row is then cut at the same tokens as alone. Rows with fewer real tokens than others get
    padding in the last pieces.

    Args:
        block: T tokens.
        chunk: the most tokens of a piece.

    Yields:
        ``(columns, piece)``: int64 ``[B, c]``, the columns of the block that the piece holds.
    """
    batch, _, length, _ = block.query.shape
    columns = torch.arange(length, device=block.query.device).expand(batch, length)
    if block.real is None:
        for part in columns.split(chunk, dim=1):
            at = slice(int(part[0, 0]), int(part[0, -1]) + 1)
            yield part, _columns(block, at)
        return
    # Real tokens first, in their order.
    columns = (~block.real).to(torch.uint8).argsort(dim=1, stable=True)
    longest = int(block.real.sum(dim=1).max())
    for part in columns[:, :longest].split(chunk, dim=1):
        yield part, _gathered(block, part)


def _columns(block: Block, at: slice) -> Block:
    """A view of the same columns of every row."""
    query, key, value = (part[:, :, at] for part in (block.query, block.key, block.value))
    undo = None if block.undo is None else block.undo[:, :, at]
    return Block(query, key, value, None, undo)


def _gathered(block: Block, columns: torch.Tensor) -> Block:
    """A copy of each row's own columns, int64 ``[B, c]``."""
    assert block.real is not None
    rows = torch.arange(columns.shape[0], device=columns.device).unsqueeze(1)

    def take(states: torch.Tensor) -> torch.Tensor:
        """Each row's columns, of ``[B, H, T, ...]``."""
        own_rows = rows if states.shape[0] > 1 else torch.zeros_like(rows)
        return states.transpose(1, 2)[own_rows, columns].transpose(1, 2)

    query, key, value = (take(part) for part in (block.query, block.key, block.value))
    real = block.real.gather(1, columns)
    undo = None if block.undo is None else take(block.undo)
    return Block(query, key, value, None if bool(real.all()) else real, undo)
