"""PyTorch's fused attention on a GPU, which returns the log-sum-exp of each row."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from h2okv.ops.flash import LARGEST_HEAD
from h2okv.ops.reference import AttentionSpec, Visibility


@functools.cache
def _varlen() -> tuple[Any, Any] | None:
    """`varlen_attn` and the request for the log-sum-exp; ``None`` in releases without it."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    return varlen_attn, AuxRequest(lse=True)


def applies(query: Tensor, value: Tensor, visibility: Visibility, spec: AttentionSpec) -> bool:
    """Says whether `forward` can do a block of queries ``[B, HQ, T, D]``."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= LARGEST_HEAD
        and query.shape[-1] % 8 == 0
        and visibility.entries is None
        and visibility.queries is None
        and spec.softcap is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and _varlen() is not None
    )


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Fused attention that keeps the log-sum-exp of each row, by PyTorch's own kernel.

    As `h2okv.ops.triton_prefill.forward`, for queries that are the last of the keys' tokens.
    """
    kernel = _varlen()
    assert kernel is not None, "applies() was not asked"
    attend, request = kernel
    batch, num_heads, length, size = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    options = {"enable_gqa": num_heads != num_kv_heads}
    if "enable_gqa" not in inspect.signature(attend).parameters:  # torch 2.11, for example
        options = {}
        key, value = (
            states.repeat_interleave(num_heads // num_kv_heads, dim=1) for states in (key, value)
        )
        num_kv_heads = num_heads
    edges = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    # The last query sees the last key: shorter blocks stand at the end of the keys.
    output, limits = attend(
        query.transpose(1, 2).reshape(-1, num_heads, size),
        key.transpose(1, 2).reshape(-1, num_kv_heads, size),
        value.transpose(1, 2).reshape(-1, num_kv_heads, size),
        edges * length, edges * num_keys, length, num_keys,
        return_aux=request, scale=scale, window_size=(-1, 0), **options,
    )  # fmt: skip
    if limits.shape[0] != num_heads:  # as it is documented, and not as it is
        limits = limits.T
    limits = limits.view(num_heads, batch, length).transpose(0, 1).contiguous()
    return output.view(batch, length, num_heads, size).transpose(1, 2), limits
