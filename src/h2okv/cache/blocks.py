"""A forward's new tokens, cut into the blocks of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Block:
    """New tokens of one layer.

    Attributes:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, Dv]``.
        real: bool ``[B, T]``, False for padding; ``None`` if there is none.
        position_ids: int ``[B, T]`` or ``[1, T]``; ``None`` where nobody asks.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    real: torch.Tensor | None
    position_ids: torch.Tensor | None

    def at(self, position_ids: torch.Tensor) -> Block:
        """Returns the same tokens at other positions.

        Args:
            position_ids: int ``[B, T]`` or ``[1, T]``.
        """
        return replace(self, position_ids=position_ids)


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
    ids = block.position_ids
    return Block(
        block.query[:, :, at],
        block.key[:, :, at],
        block.value[:, :, at],
        None,
        None if ids is None else ids[:, at],
    )


def _gathered(block: Block, columns: torch.Tensor) -> Block:
    """A copy of each row's own columns, int64 ``[B, c]``."""
    assert block.real is not None
    index = columns[:, None, :, None]

    def take(states: torch.Tensor) -> torch.Tensor:
        return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))

    real = block.real.gather(1, columns)
    ids = block.position_ids
    if ids is not None:
        ids = ids.expand(columns.shape[0], -1).gather(1, columns)
    return Block(
        take(block.query),
        take(block.key),
        take(block.value),
        None if bool(real.all()) else real,
        ids,
    )
