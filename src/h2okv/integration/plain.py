"""Attention of layers that have no H2O entries: sliding windows, other caches, no cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from h2okv.integration.masks import WINDOW_DTYPE
from h2okv.ops.blockwise import Visibility, blockwise_attention_with_scores
from h2okv.ops.reference import attention_with_scores
from h2okv.ops.windowed import windowed_attention


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """SDPA, or what SDPA has not: a window without a T x T mask, and soft-capped logits.

    Args:
        module: the model's attention module.
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]``.
        value: ``[B, H, N, Dv]``.
        mask: what `h2o_mask` made.
        scaling: factor on the logits; ``D ** -0.5`` if ``None``.
        dropout: share of the probabilities that is dropped.
        softcap: soft cap of the logits (Gemma 2) or ``None``.
        options: what else the model gives its attention.

    Returns:
        ``(output [B, T, HQ, Dv], None)``.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    has_window = mask is not None and mask.dtype == WINDOW_DTYPE
    if softcap is None and not has_window:
        if mask is not None and mask.shape[-2] == 1 < query.shape[2]:
            mask = mask & _causal(query, key)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
        )
    if torch.is_autocast_enabled(query.device.type):  # as SDPA does
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (states.to(dtype) for states in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        if softcap is not None:
            output = _capped(query, key, value, mask, scale, softcap)
        else:
            assert mask is not None
            window, real = _read_window(mask)
            assert window is not None
            output = windowed_attention(query, key, value, real, window, scale, dropout)
    return output.transpose(1, 2).contiguous(), None


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Soft-capped attention, ``[B, HQ, T, Dv]``: by blocks, unless a gradient must pass."""
    if mask is not None and mask.shape[-2] != 1:
        return attention_with_scores(query, key, value, mask, scale, softcap)[0]
    if mask is None and query.shape[2] > 1:
        # As SDPA is causal: a prompt on a static cache, whose other slots are empty.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    past = key.shape[2] - query.shape[2]
    window, real = (None, None) if mask is None else _read_window(mask)
    if not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        entries = None if real is None else real[:, None, :]
        visibility = Visibility(past=past, entries=entries, window=window)
        return blockwise_attention_with_scores(query, key, value, visibility, scale, softcap)[0]
    visible = _causal(query, key)
    if window is not None:
        visible = visible & ~visible.tril(past - window)
    if real is not None:
        visible = visible & real[:, None, None, :]
    return attention_with_scores(query, key, value, visible, scale, softcap)[0]


def _read_window(mask: torch.Tensor) -> tuple[int | None, torch.Tensor]:
    """Takes a compact mask apart: the window, and which keys are real, bool ``[B, N]``."""
    window = int(mask.max()) if mask.dtype == WINDOW_DTYPE else None
    return window, mask[:, 0, 0, :] > 0


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mask, bool ``[1, 1, T, N]``: each query sees the keys up to itself, one of the last T."""
    length, total = query.shape[2], key.shape[2]
    mask = torch.ones(1, 1, length, total, dtype=torch.bool, device=query.device)
    return mask.tril(total - length)
