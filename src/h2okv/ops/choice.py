"""Who leaves at a cut: the one order in which entries go.

Protected entries never go. Of the others those with the lowest priority go first, and on equal
priority the older. Steps that evict a single entry and the kernels implement the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Of a budget without its sinks, as a fraction: what new tokens may have while they are written.
WRITTEN_SHARE = 2, 5


class CutRules(NamedTuple):
    """What a cut protects, and how much stays."""

    num_real_tokens: Tensor  # int64 [B], tokens read, without padding
    sink: Tensor  # protected first positions, int64 [B, 1, 1]
    recent: Tensor  # protected newest positions, int64 [B, 1, 1] or [B, H, 1]
    total: Tensor  # budget K, int64 [B, 1, 1] or, by head, [B, H, 1]
    # Tokens written since the prompt was read whole, int64 [B]; up to a share of the budget, after
    # pins, they are protected like recent ones. None: none.
    written: Tensor | None = None


def recent_with_written(
    recent: Tensor, sink: Tensor, total: Tensor, written: Tensor, scores: Tensor
) -> Tensor:
    """Return how many newest positions are protected, int64 ``[B, H, 1]`` (`CutRules`).

    Scores, fp32 ``[B, H, N]``, are infinite where an entry is pinned.
    """
    room = total - sink
    share = room * WRITTEN_SHARE[0] // WRITTEN_SHARE[1]
    room = room - scores.isinf().sum(dim=-1, keepdim=True)
    return recent.maximum(share.minimum(room).minimum(written.view(-1, 1, 1)))


def protected_entries(
    positions: Tensor, newest: Tensor | int, sink: Tensor | int | None, recent: Tensor | int
) -> Tensor:
    """Mark the entries that eviction must not touch.

    Args:
        positions: original positions, ``[B, H, N]``; -1 for an empty slot (the mark means nothing
            there).
        newest: position of the newest token, ``[B, 1, 1]``, or a number for all sequences.
        sink: protected first positions, likewise; ``None`` if there are none.
        recent: protected newest positions, likewise.

    Returns:
        bool ``[B, H, N]``.
    """
    protected = positions > _like(positions, newest - recent)
    if sink is not None:
        protected |= positions < _like(positions, sink)
    return protected


def _like(positions: Tensor, limit: Any) -> Any:
    # A comparison across dtypes would convert the large side.
    return limit.to(positions.dtype) if isinstance(limit, Tensor) else limit


def choose_all(positions: Tensor, has_gaps: bool, limit: int) -> tuple[Tensor, Tensor]:
    """Choose all entries, where none has to leave; arguments and result as of `choose`.

    Without gaps, all of ``[B, H, N]`` are entries.
    """
    num_entries = positions.shape[-1]
    indices = torch.arange(num_entries, device=positions.device).expand(positions.shape)
    if has_gaps:
        indices = torch.where(positions >= 0, indices, num_entries).sort(dim=-1).values
    indices = indices[..., : min(limit, num_entries)]
    return indices.clamp(max=num_entries - 1), indices < num_entries


def choose(
    priority: Tensor,
    positions: Tensor,
    protected: Tensor,
    total: Tensor,
    limit: int,
    is_in_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """Chooses what stays after a block, for each sequence and head.

    Args:
        priority: fp32 ``[B, H, N]``; the lowest go first, on equal priority the older.
        positions: int32 ``[B, H, N]``; -1 marks a slot without an entry.
        protected: bool ``[B, H, N]``, entries that stay.
        total: budget ``K`` of each sequence, int64 ``[B, 1, 1]``, or ``[B, H, 1]`` by head.
        limit: the largest ``K`` of the batch.
        is_in_order: whether the positions of entries ascend.

    Returns:
        ``(indices, kept)``: int64 and bool ``[B, H, min(limit, N)]``. ``indices`` ascend; where
        ``kept`` is False (a sequence with fewer entries than the limit) the index means nothing.
    """
    num_entries = priority.shape[-1]
    rank = torch.where(protected, torch.inf, priority)
    rank = torch.where(positions < 0, -torch.inf, rank)
    # A stable sort by position, then one by rank: equal ranks stay in order of age.
    if is_in_order:
        order = rank.argsort(dim=-1, stable=True)
    else:
        by_age = positions.argsort(dim=-1, stable=True)
        order = by_age.gather(-1, rank.gather(-1, by_age).argsort(dim=-1, stable=True))
    size = min(limit, num_entries)
    order = order[..., num_entries - size :]
    place_from_end = torch.arange(size, 0, -1, device=priority.device)
    is_kept = (place_from_end <= total) & (positions.gather(-1, order) >= 0)
    indices = torch.where(is_kept, order, num_entries).sort(dim=-1).values
    return indices.clamp(max=num_entries - 1), indices < num_entries
