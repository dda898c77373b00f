"""What each query of a block sees of a full cache when it may choose."""

from __future__ import annotations

import torch


def choose_by_query(
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    always: torch.Tensor,
    most: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Takes from each query all but the entries that it attends to most.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]``, in the order of the text.
        visible: bool ``[B, H, T, N]``, what causality and padding leave.
        always: bool ``[B, H, N]``, entries that are seen without being chosen.
        most: int64 ``[B, 1, 1]``, how many of the others each query head chooses; of those with
            equal attention the newer.
        scale: factor on the logits.

    Returns:
        bool ``[B, HQ, T, N]``.
    """
    groups = query.shape[1] // key.shape[1]
    seen, kept = (t.repeat_interleave(groups, dim=1) for t in (visible, always.unsqueeze(2)))
    # A soft cap would not change the order.
    logits = query.float() @ key.float().repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    open_to_choice = seen & ~kept
    ranks = logits.masked_fill(~open_to_choice, -torch.inf)
    # Stable, from the newest on: among equals the newer comes first.
    order = ranks.flip(-1).argsort(dim=-1, descending=True, stable=True)
    places = torch.empty_like(order)
    counted = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    places.scatter_(-1, order, counted)
    best = places.flip(-1) < most.unsqueeze(-1)
    return (seen & kept) | (open_to_choice & best)
