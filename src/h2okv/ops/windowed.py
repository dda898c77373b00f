"""Sliding-window attention in O(T) memory, for layers that H2O leaves alone: no scores."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

_MIN_BLOCK, _MAX_BLOCK = 64, 512


def windowed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None,
    window: int,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attends by blocks of queries, each over just the keys that its windows reach.

    Args:
        query: ``[B, HQ, T, D]``, the last T tokens.
        key: ``[B, H, N, D]`` with N at least T.
        value: ``[B, H, N, Dv]``.
        real: bool ``[B, N]``, False for padding; ``None`` if there is none.
        window: keys that a query sees, itself included.
        scale: factor on the logits.
        dropout: share of the probabilities that is dropped.

    Returns:
        ``[B, HQ, T, Dv]``; gradients pass.
    """
    length, past = query.shape[2], key.shape[2] - query.shape[2]
    # A block as large as the window computes at most twice what is needed.
    size = max(_MIN_BLOCK, min(_MAX_BLOCK, window))
    outputs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        reach = slice(max(0, past + start - window + 1), past + stop)
        own = torch.arange(past + start, past + stop, device=query.device).unsqueeze(1)
        columns = torch.arange(reach.start, reach.stop, device=query.device)
        visible = (columns <= own) & (columns > own - window)
        if real is not None:
            visible = visible & real[:, None, None, reach]
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, reach],
                value[:, :, reach],
                attn_mask=visible,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2)
