"""Causal attention in blocks of queries: no work above the diagonal, made for torch.compile.

Each block of queries sees only the keys up to its own end, and the query heads of a group share
one matrix product, so keys are never repeated.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "training_blocks"


def block_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends causally; windows are dense, so no mask is read.

    Args:
        module: The attention layer (unused).
        query: Shape [B, HQ, T, D].
        key: Shape [B, H, T, D].
        value: Shape [B, H, T, D].
        attention_mask: Unused.
        scaling: Factor of the logits; by default D ** -0.5.

    Returns:
        The output [B, T, HQ, D], and no weights.
    """
    batch, query_heads, length, size = query.shape
    heads = key.shape[1]
    group = query_heads // heads
    block = 256 if length > 1024 else 128
    query = query.view(batch, heads, group, length, size) * (scaling or size**-0.5)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        rows = query[:, :, :, start:stop].reshape(batch, heads, group * (stop - start), size)
        logits = torch.matmul(rows, key[:, :, :stop].transpose(2, 3))
        logits = logits.view(batch, heads, group, stop - start, stop).float()
        future = torch.arange(start, stop)[:, None] < torch.arange(stop)[None]
        weights = logits.masked_fill(future, float("-inf")).softmax(-1).to(value.dtype)
        weights = weights.view(batch, heads, group * (stop - start), stop)
        output = torch.matmul(weights, value[:, :, :stop])
        outputs.append(output.view(batch, heads, group, stop - start, size))
    output = torch.cat(outputs, dim=3).view(batch, query_heads, length, size)
    return output.transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the attention known to transformers.

    Returns:
        The name to give as `attn_implementation`.
    """
    AttentionInterface.register(NAME, block_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME
