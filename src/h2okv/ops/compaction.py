"""Moving what stays after a block into its slots."""

from __future__ import annotations

import torch


def compact(entries: torch.Tensor, indices: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Copies whole entries into the first of new slots.

    Args:
        entries: ``[B, H, N, D]``, of any strides.
        indices: int64 ``[B, H, K]``, below N.
        num_slots: S, at least K.

    Returns:
        ``[B, H, S, D]``, contiguous; zero beyond K.
    """
    batch, heads, count = indices.shape
    rows = torch.arange(batch, device=entries.device).view(-1, 1, 1)
    columns = torch.arange(heads, device=entries.device).view(1, -1, 1)
    slots = entries.new_zeros(batch, heads, num_slots, entries.shape[-1])
    # Whole entries at once; gather with an index for each number takes twice the time.
    slots[:, :, :count] = entries[rows, columns, indices]
    return slots
