"""Chooses the implementation of an operation."""

from __future__ import annotations

import torch

from h2okv.ops.blockwise import Visibility, blockwise_attention_with_scores


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends over a block in O(T) memory by the fastest way that takes the arguments.

    There is one way so far, for every device.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]`` with N = past + T.
        value: ``[B, H, N, Dv]``.
        visibility: who sees what.
        scale: factor on the logits.
        softcap: as in `reference.attention_with_scores`.

    Returns:
        ``(output, sums)`` as in `reference.attention_with_scores`.
    """
    return blockwise_attention_with_scores(query, key, value, visibility, scale, softcap)
