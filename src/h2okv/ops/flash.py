"""PyTorch's own FlashAttention, where it can do a block: it keeps the log-sum-exp of each row."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from h2okv.ops.blockwise import Visibility

_LARGEST_HEAD = 256


@functools.cache
def _varlen() -> tuple[Any, Any] | None:
    """`varlen_attn` and the request for the log-sum-exp; ``None`` in releases that lack either."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    if not {"window_size", "enable_gqa", "return_aux"} <= set(
        inspect.signature(varlen_attn).parameters
    ):
        return None
    return varlen_attn, AuxRequest(lse=True)


def applies(
    query: torch.Tensor, value: torch.Tensor, visibility: Visibility, softcap: float | None
) -> bool:
    """Says whether `forward` can do a block.

    Args:
        query: ``[B, HQ, T, D]``.
        value: ``[B, H, N, Dv]``.
        visibility: who sees what.
        softcap: soft cap of the logits or ``None``.

    Returns:
        False on a CPU, in fp32, with padding, holes among the entries or a soft cap.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % 8 == 0
        and visibility.entries is None
        and visibility.queries is None
        and softcap is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and _varlen() is not None
    )


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused attention that keeps the log-sum-exp of each row.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]`` with N = past + T.
        value: ``[B, H, N, D]``.
        visibility: ``past`` and ``window`` count.
        scale: factor on the logits.

    Returns:
        ``(output, log_sum_exp)``: ``[B, HQ, T, D]``, laid out as ``[B, T, HQ, D]``, and fp32
        ``[B, HQ, T]``, natural.
    """
    found = _varlen()
    assert found is not None, "applies() was not asked"
    attend, request = found
    batch, num_heads, length, size = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    edges = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    window = -1 if visibility.window is None else visibility.window - 1
    # The last query sees the last key: shorter blocks stand at the end of what is held.
    output, limits = attend(
        query.transpose(1, 2).reshape(-1, num_heads, size),
        key.transpose(1, 2).reshape(-1, num_kv_heads, size),
        value.transpose(1, 2).reshape(-1, num_kv_heads, size),
        edges * length, edges * num_keys, length, num_keys,
        return_aux=request, scale=scale, window_size=(window, 0),
        enable_gqa=num_heads != num_kv_heads,
    )  # fmt: skip
    if limits.shape[0] != num_heads:  # as it is documented, and not as it is
        limits = limits.T
    limits = limits.view(num_heads, batch, length).transpose(0, 1).contiguous()
    return output.view(batch, length, num_heads, size).transpose(1, 2), limits
