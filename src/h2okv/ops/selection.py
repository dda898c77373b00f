"""From priorities to kept entries: the part of eviction that all policies share."""

from __future__ import annotations

import torch

_BEHIND_ALL = 1 << 30
"""Added to a position, it sorts behind every other; no sequence is that long."""


def protected_entries(
    positions: torch.Tensor, newest: torch.Tensor, sink: torch.Tensor | None, recent: torch.Tensor
) -> torch.Tensor:
    """Marks the entries that eviction must not touch.

    Args:
        positions: original positions, ``[B, H, N]``; -1 for an empty slot (the mark means nothing
            there).
        newest: position of the newest token, ``[B, 1, 1]``.
        sink: protected first positions, ``[B, 1, 1]``; ``None`` if there are none.
        recent: protected newest positions, ``[B, 1, 1]``.

    Returns:
        bool ``[B, H, N]``.
    """
    # In the positions' own dtype: a comparison across dtypes converts the large side.
    protected = positions > (newest - recent).to(positions.dtype)
    if sink is not None:
        protected |= positions < sink.to(positions.dtype)
    return protected


def keep_indices(
    priority: torch.Tensor,
    positions: torch.Tensor,
    protected: torch.Tensor,
    total: torch.Tensor,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses what stays after a block, for each sequence and head.

    Args:
        priority: fp32 ``[B, H, N]``; the lowest go first, on equal priority the older.
        positions: int32 ``[B, H, N]``; -1 marks what is not an entry.
        protected: bool ``[B, H, N]``, entries that stay.
        total: budget ``K`` of each sequence, int64 ``[B, 1, 1]``.
        limit: the largest ``K`` of the batch.

    Returns:
        ``(indices, kept)``: int64 and bool ``[B, H, min(limit, N)]``. ``indices`` ascend; where
        ``kept`` is False (a sequence with fewer entries than the limit) the index means nothing.
    """
    num_entries = priority.shape[-1]
    rank = torch.where(protected, torch.inf, priority)
    rank = torch.where(positions < 0, -torch.inf, rank)
    # Two stable sorts: by position, then by rank, so that equal ranks stay in order of age.
    by_age = positions.argsort(dim=-1, stable=True)
    order = by_age.gather(-1, rank.gather(-1, by_age).argsort(dim=-1, stable=True))
    size = min(limit, num_entries)
    order = order[..., num_entries - size :]
    place_from_end = torch.arange(size, 0, -1, device=priority.device)
    kept = (place_from_end <= total) & (positions.gather(-1, order) >= 0)
    indices = torch.where(kept, order, num_entries).sort(dim=-1).values
    return indices.clamp(max=num_entries - 1), indices < num_entries


def free_slot(
    priority: torch.Tensor,
    positions: torch.Tensor,
    protected: torch.Tensor,
    enabled: torch.Tensor | None,
    full: bool = False,
) -> torch.Tensor:
    """Finds the slot that the next token takes: an empty one, else the first to be evicted.

    Static shapes and no host sync, for the decode step.

    Args:
        priority: fp32 ``[B, H, S]``.
        positions: int32 ``[B, H, S]``; -1 marks an empty slot.
        protected: bool ``[B, H, S]``.
        enabled: bool ``[B, 1, S]``, slots within the sequence's budget + 1; ``None`` if all are.
        full: True if no slot is empty or out of a budget, which saves looking for those.

    Returns:
        int64 ``[B, H, 1]``, the slot's index.
    """
    rank = priority.masked_fill(protected, torch.inf)
    if not full:
        rank = rank.masked_fill(positions < 0, -torch.inf)
        if enabled is not None:
            rank = rank.masked_fill(~enabled, torch.inf)
    lowest = rank.amin(dim=-1, keepdim=True)
    # Of those with the lowest rank the oldest; an addition is cheaper than filling by a mask.
    age = torch.add(positions, rank > lowest, alpha=_BEHIND_ALL)
    return age.min(dim=-1, keepdim=True).indices
