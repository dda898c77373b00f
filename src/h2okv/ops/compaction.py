"""Move the entries that stay after a block into the first slots of their heads."""

from __future__ import annotations

import torch
from torch import Tensor

NO_HEAD = 255  # the head of shared slots that belong to none


def compact(
    entries: Tensor, indices: Tensor, num_slots: int, heads: Tensor | None = None
) -> Tensor:
    """Copy whole entries into the first of new slots.

    Args:
        entries: ``[B, H, N, D]``, of any strides.
        indices: int64 ``[B, H, K]``, below N.
        num_slots: S, at least K.
        heads: the head that each index is of, int64, as large as `indices`; ``None``: of its row.

    Returns:
        ``[B, H, S, D]``, contiguous; zero beyond K.
    """
    count = indices.shape[2]
    # Whole entries at once, straight to their places; gather with an index for each number takes
    # twice the time, and a copy of what stays would need its memory once more.
    padded = torch.nn.functional.pad(indices, (0, num_slots - count))
    slots = pick(entries, padded, heads).contiguous()
    slots[:, :, count:] = 0
    return slots


def pick(entries: Tensor, indices: Tensor, heads: Tensor | None = None) -> Tensor:
    """Gather ``[B, H, N, ...]`` by indices ``[B, H', K]``; heads as in `compact`."""
    rows = torch.arange(len(entries), device=entries.device).view(-1, 1, 1)
    if heads is None:
        heads = torch.arange(entries.shape[1], device=entries.device).view(1, -1, 1)
    return entries[rows, heads, indices]


def share_slots(
    indices: Tensor, is_kept: Tensor, total: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Put the entries of heads that keep different numbers into one row of slots.

    Args:
        indices: int64 ``[B, H, K]``, as `choose` returns them: evicted ones come last.
        is_kept: bool ``[B, H, K]``.
        total: entries that each head has room for, int64 ``[B, H, 1]``; no fewer than are kept. A
            head has one slot more.
        num_slots: S, the slots of the sequence that has most.

    Returns:
        ``(indices, is_kept, head_of_slot)``, each ``[B, 1, S]``; head_of_slot is uint8.
    """
    ends = (total.squeeze(-1) + 1).cumsum(dim=-1)
    offsets = torch.arange(num_slots, device=indices.device)
    offsets = offsets.expand(len(ends), -1).contiguous()
    head_of_slot = torch.searchsorted(ends, offsets, right=True)
    is_unused = head_of_slot == total.shape[1]
    heads = head_of_slot.masked_fill(is_unused, 0)
    offsets = offsets - (ends - total.squeeze(-1) - 1).gather(-1, heads)
    is_beyond = is_unused | (offsets >= indices.shape[2])
    flat = heads * indices.shape[2] + offsets.masked_fill(is_beyond, 0)
    chosen, stays = (t.flatten(1).gather(-1, flat).unsqueeze(1) for t in (indices, is_kept))
    head_of_slot = head_of_slot.masked_fill(is_unused, NO_HEAD).to(torch.uint8).unsqueeze(1)
    return chosen, stays & ~is_beyond.unsqueeze(1), head_of_slot
