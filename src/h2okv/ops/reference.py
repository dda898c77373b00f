"""Plain attention with score sums: the truth that every faster path is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Which keys a block's queries see, in O(T) numbers."""

    # Number of leading keys that are kept entries; every query sees them.
    past: int = 0
    # bool, broadcastable to [B, H, N]: keys that are entries (not empty slots, not padding).
    entries: Tensor | None = None
    # bool [B, T]: queries that are real tokens. The keys of the other tokens are no entries.
    queries: Tensor | None = None


class AttentionSpec(NamedTuple):
    """How a layer's queries attend; all but `reach` is the same in each forward."""

    scale: float  # factor on the logits
    softcap: float | None = None  # logits become ``softcap * tanh(logits / softcap)`` (Gemma 2)
    sinks: Tensor | None = None  # [HQ], one more logit in each head's normaliser, of no key
    # If given, a query sees only this many newest keys up to itself (sliding window).
    window: int | None = None
    # int64 [B, T]: the last of the block's tokens that each one sees, itself or a later one
    # (tokens of one image see each other); None if all see themselves last.
    reach: Tensor | None = None


def attention_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    spec: AttentionSpec,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends with the whole T x N matrix in memory.

    Args:
        query: ``[B, HQ, T, D]``; HQ is a multiple of H, consecutive query heads share a KV head.
        key: ``[B, H, N, D]``.
        value: ``[B, H, N, Dv]``.
        visible: bool, broadcastable to ``[B, H, T, N]``; a query that sees nothing gives zeros.
        spec: how; its window and reach are up to ``visible``.
        weights: fp32 ``[B, T]``, what a query's attention counts for in the sums; ``None``: one.

    Returns:
        ``(output, sums)``: output ``[B, HQ, T, Dv]`` in the query's dtype; sums ``[B, H, N]``, the
        probability that each key received, over queries and the KV head's group. Computed in fp32,
        or in fp64 for fp64 input.
    """
    batch, num_heads, length, _ = query.shape
    num_kv_heads = key.shape[1]
    compute = compute_dtype(query.dtype)
    grouped = query.to(compute).view(batch, num_kv_heads, num_heads // num_kv_heads, length, -1)
    logits = grouped @ key.to(compute).unsqueeze(2).transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    hidden = ~visible.unsqueeze(-3)
    sinks = None if spec.sinks is None else spec.sinks.view(num_kv_heads, -1, 1, 1)
    probabilities = softmax(logits.masked_fill(hidden, -torch.inf), sinks)
    probabilities = probabilities.masked_fill(hidden, 0.0)
    output = probabilities @ value.to(compute).unsqueeze(2)
    if weights is not None:
        probabilities = probabilities * weights[:, None, None, :, None]
    return output.flatten(1, 2).to(query.dtype), probabilities.sum(dim=(2, 3))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what attention on tensors of a dtype is computed in: fp32, or fp64 for fp64."""
    # Not `torch.promote_types`, which is an operation more in every step of a layer.
    return dtype if dtype == torch.float64 else torch.float32


def value_norms(values: Tensor) -> Tensor:
    """Return the L1 norms of values ``[B, H, N, Dv]``, fp32 ``[B, H, N]``, never 0."""
    # Not `torch.promote_types`, an operation more in every step; float64 is not narrowed before.
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    if values.is_cuda:  # one launch; on a CPU it takes six times as long
        norms = torch.linalg.vector_norm(values, 1, dim=-1, dtype=wide).to(torch.float32)
    else:
        norms = values.abs().sum(dim=-1, dtype=wide).to(torch.float32)
    return norms.clamp_(min=torch.finfo(torch.float32).tiny)  # inf (a pin) times 0 would be NaN


def softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Normalise logits ``[..., N]``, with one more if sinks ``[..., 1]`` are given."""
    if sink_logits is None:
        return torch.softmax(logits, dim=-1)
    sink_logits = sink_logits.to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, sink_logits], dim=-1), dim=-1)[..., :-1]


def causal(query: Tensor, key: Tensor) -> Tensor:
    """Return the keys that each query sees, bool ``[T, N]``; the last query sees the last key."""
    columns = torch.arange(key.shape[2], device=key.device)
    return columns <= columns[-query.shape[2] :].unsqueeze(1)
