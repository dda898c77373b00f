"""The attention that entries may expect of later queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TILE_ELEMENTS = 1 << 19
"""Numbers of a tile on a CPU: 2 MiB in fp32, which its cache holds."""
_TILE_ELEMENTS_GPU = 1 << 26


def expected_attention(
    query: Tensor,
    key: Tensor,
    entries: Tensor | None,
    queries: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Lets every query attend to all entries, whichever came first.

    Args:
        query: ``[B, HQ, T, D]``, where the next queries will be: behind all keys.
        key: ``[B, H, N, D]``; anything finite where there is no entry.
        entries: bool ``[B, H, N]``, keys that are entries; ``None`` if all are.
        queries: bool ``[B, T]``, queries that are real tokens; ``None`` if all are.
        scale: factor on the logits.
        softcap: as in `reference.attention_with_scores`.

    Returns:
        fp32 ``[B, H, N]``: for each key the L2 norm of its probabilities, over the queries and the
        heads of the KV head's group. A key that one query needs weighs more than one to which many
        give a little.
    """
    batch, heads, count, _ = key.shape
    sums = torch.zeros(batch, heads, count, dtype=torch.float32, device=key.device)
    bias = None
    if entries is not None:
        bias = torch.zeros_like(sums).masked_fill_(~entries, torch.finfo(torch.float32).min)
    limit = _TILE_ELEMENTS_GPU if key.is_cuda else _TILE_ELEMENTS
    for row in range(batch):
        own: Any = slice(None) if queries is None else queries[row]
        asked = query[row].unflatten(0, (heads, -1))[:, :, own].float().flatten(1, 2) * scale
        seen = key[row].float().transpose(1, 2)
        for part in asked.split(max(1, limit // (heads * count)), dim=1):
            logits = part @ seen
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            if bias is not None:
                logits += bias[row].unsqueeze(1)
            sums[row] += logits.softmax(dim=-1).square_().sum(dim=1)
    return sums.sqrt_() if entries is None else sums.sqrt_().masked_fill_(~entries, 0.0)
