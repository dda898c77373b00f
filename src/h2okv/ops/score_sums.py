"""Second way to the scores: from fused attention's log-sum-exp, without values."""

from __future__ import annotations

import torch

from h2okv.ops.blockwise import Visibility

_ROWS = 64


def score_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    log_sum_exp: torch.Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums the probability that each key received; plain PyTorch, some queries at a time.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]`` with N = past + T. What is no entry may be anything finite.
        log_sum_exp: fp32 ``[B, HQ, T]``, natural, of each query's logits; inf for a query that
            sees nothing or is padding.
        visibility: who sees what.
        scale: factor on the logits.
        softcap: as in `reference.attention_with_scores`.
        weights: likewise.

    Returns:
        fp32 ``[B, H, N]``, over queries and the KV head's group; 0 for what is no entry.
    """
    batch, num_heads, length, size = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    grouped = query.view(batch, num_kv_heads, -1, length, size)
    limits = log_sum_exp.view(batch, num_kv_heads, -1, length, 1)
    columns = torch.arange(num_keys, device=key.device)
    keys = key.float().unsqueeze(2).transpose(-1, -2)
    sums = torch.zeros(batch, num_kv_heads, num_keys, dtype=torch.float32, device=key.device)
    for start in range(0, length, _ROWS):
        at = slice(start, start + _ROWS)
        logits = grouped[:, :, :, at].float() @ keys * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        own = visibility.past + torch.arange(length, device=key.device)[at].unsqueeze(1)
        visible = columns <= own
        if visibility.window is not None:
            visible &= columns > own - visibility.window
        shares = torch.exp(logits - limits[:, :, :, at]).masked_fill(~visible, 0.0)
        if weights is not None:
            shares *= weights[:, None, None, at, None]
        sums += shares.sum(dim=(2, 3))
    entries = entries_of(visibility, sums)
    return sums if entries is None else sums.masked_fill(~entries, 0.0)


def entries_of(visibility: Visibility, like: torch.Tensor) -> torch.Tensor | None:
    """Says which keys are entries.

    Args:
        visibility: who sees what.
        like: ``[B, H, N]``.

    Returns:
        bool ``[B, H, N]``; ``None`` if all are.
    """
    if visibility.entries is not None:
        return visibility.entries.expand(like.shape)
    if visibility.queries is None:
        return None
    own = visibility.queries
    before = own.new_ones(own.shape[0], visibility.past)
    return torch.cat([before, own], dim=1).unsqueeze(1).expand(like.shape)
