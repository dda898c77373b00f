"""PyTorch's fused attention on a CPU, and the score sums that it can compute.

A key's score is the sum over the queries of ``exp(q . k * scale - L[q])``, with L the log-sum-exp
that fused attention gives for each query. It is an exponential of a log-sum-exp itself, that of
the key asking the queries. So where the fused kernel is fast enough, as on a CPU with AMX, it is
run a second time with keys and queries exchanged, and backwards in time, for a key is asked by the
queries from its own on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from h2okv.ops.reference import AttentionSpec, attention_with_scores, causal
from h2okv.provenance import processor

IS_AMD = "AMD" in processor()  # MKL's products and SDPA's kernel take twice the time there
# Columns behind a head's own, of which three hold minus L in bf16 parts of 8 bits each.
_MORE_COLUMNS, _PARTS = 8, 3
LARGEST_HEAD = 256
_LARGE_HEAD = 128  # of bf16: from here on the tiles take nine tenths of the time
# Of fewer queries the tiles are as fast.
_MIN_QUERIES = 128
# Instead of minus infinity for the logarithm of a weight of zero, which has no parts.
_LOWEST = -1e4


def sums_apply(query: Tensor, key: Tensor, value: Tensor, needs_sums: bool = True) -> bool:
    """Says whether `attention_with_sums` can do one sequence, ``[H, G, T, D]`` and ``[H, N, D]``.

    Its kernel knows neither a cap nor hidden keys. It is faster than `h2okv.ops.attention`'s tiles
    for bf16 with AMX and, but on AMD's processors, without sums for fp32 and small heads.
    """
    has_amx = value.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    is_small = value.dtype == torch.float32 or query.shape[-1] < _LARGE_HEAD
    return (
        value.dtype in (torch.float32, torch.bfloat16)
        and (has_amx or (is_small and not (needs_sums or IS_AMD)))
        and query.dtype == key.dtype == value.dtype
        and query.is_cpu
        and query.shape[2] >= _MIN_QUERIES
        and query.shape[-1] == value.shape[-1] <= LARGEST_HEAD
        and _sums_agree(query.shape[-1])
    )


def attention_with_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: int,
    spec: AttentionSpec,
    weights: Tensor | None,
    needs_sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attends over ``past`` entries and the block itself.

    Args:
        query: ``[H, G, T, D]`` of one sequence, bf16; without sums fp32 too.
        key: ``[H, N, D]`` with N = past + T.
        value: ``[H, N, D]``.
        past: number of leading keys that every query sees.
        spec: scale and sinks, those ``[H, G]``.
        weights: fp32 ``[T]``, what each query counts for in the sums; ``None``: one.
        needs_sums: whether to compute the sums; zero otherwise.

    Returns:
        ``(output, sums)``: ``[H, G, T, D]`` in the query's dtype, as the model would have it
        without us, and fp32 ``[H, N]``. Products are exact, sums fp32; the kernel's
        exponentials right to 6e-5.
    """
    queries, keys, values = query.flatten(0, 1)[None], key[None], value[None]
    spans = [(slice(past, None), True)]
    if past:
        spans.append((slice(past), False))
    results = [
        _fused(queries, keys[:, :, span], values[:, :, span], spec.scale, is_causal)
        for span, is_causal in spans
    ]
    output, limits = results[0]
    if past:
        limits = torch.logaddexp(limits, results[1][1])
        shares = [(limit - limits).exp_().unsqueeze(-1) for _, limit in results]
        output = (results[0][0] * shares[0] + results[1][0] * shares[1]).to(query.dtype)
    if spec.sinks is not None:
        output, limits = add_sink(output, limits, spec.sinks.flatten())
    if not needs_sums:
        return output.view_as(query), limits.new_zeros(key.shape[:2])
    shift = -limits if weights is None else weights.log().clamp_(min=_LOWEST) - limits
    sums = key_sums(query, shift.view(query.shape[:3]), key, spec.scale, spans)
    return output.view_as(query), sums


def add_sink(output: Tensor, limits: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output ``[B, HQ, T, D]`` and log-sum-exp ``[B, HQ, T]`` with sinks ``[HQ]``."""
    sinks = sinks.float().view(1, -1, 1)
    # A query that sees nothing may have a log-sum-exp of inf, whose share is one.
    share = torch.sigmoid(limits - sinks).unsqueeze(-1)
    return (output * share).to(output.dtype), torch.logaddexp(limits, sinks)


def expected_squares(query: Tensor, key: Tensor, spec: AttentionSpec) -> Tensor:
    """Sum the squares of what every query gives to each key, whichever came first.

    Query ``[H, G, T, D]`` and key ``[H, N, D]`` are bf16, products and sums fp32, ``[H, N]``;
    sinks are ``[H, G]``.
    """
    queries, keys = query.flatten(0, 1)[None], key[None]
    output, limits = _fused(queries, keys, keys, spec.scale, False)
    if spec.sinks is not None:
        _, limits = add_sink(output, limits, spec.sinks.flatten())
    shift = limits.view(query.shape[:3]).mul_(-2)
    return key_sums(query, shift, key, 2 * spec.scale, [(slice(None), False)])


def key_sums(
    query: Tensor, shift: Tensor, key: Tensor, scale: float, spans: list[tuple[slice, bool]]
) -> Tensor:
    """Sum ``exp(q . k * scale + shift[q])`` over the queries of each key's group.

    Args:
        query: ``[H, G, T, D]``, bf16.
        shift: fp32 ``[H, G, T]``.
        key: ``[H, N, D]``, bf16.
        scale: factor on the products.
        spans: slices of the keys, each with True if they are the queries' own tokens: then only
            queries from a key on count.

    Returns:
        fp32 ``[H, N]``.
    """
    heads, groups, length, size = query.shape
    queries = query.new_zeros(heads, groups, length, size + _MORE_COLUMNS)
    queries[..., :size] = query.flip(2)
    remainder = shift.flip(2) / scale
    for column in range(size, size + _PARTS):
        queries[..., column] = rounded = remainder.to(queries.dtype)
        remainder = remainder - rounded
    queries = queries.flatten(0, 1)[None]
    sums = shift.new_empty(key.shape[:2])
    for span, is_causal in spans:
        span_keys = key[:, span].flip(1)
        asking_keys = span_keys.new_zeros(heads, groups, span_keys.shape[1], size + _MORE_COLUMNS)
        asking_keys[..., :size] = span_keys[:, None]
        asking_keys[..., size : size + _PARTS] = 1
        # The output is discarded; only the log-sum-exp is used.
        _, limits = _fused(asking_keys.flatten(0, 1)[None], queries, queries, scale, is_causal)
        sums[:, span] = limits.view(heads, groups, -1).exp_().sum(dim=1).flip(1)
    return sums


def _fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's kernel for CPUs: output ``[1, HQ, T, D]``, log-sum-exp fp32 ``[1, HQ, T]``."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, limits = attend(query, key, value, 0.0, is_causal, scale=scale)
    return output, limits.contiguous()


@functools.cache
def _sums_agree(size: int) -> bool:
    """Try the kernel, which has no public name, before it decides a user's text."""
    # Whatever the default device is.
    options: Any = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    query = torch.randn(2, 2, 70, size, **options).bfloat16()
    key, value = (torch.randn(2, 70, size, **options).bfloat16() for _ in range(2))
    spec = AttentionSpec(size**-0.5)
    try:
        actual = attention_with_sums(query[:, :, 20:], key, value, 20, spec, None)
    except Exception:  # the tiles serve then, for any reason
        return False
    states = query.flatten(0, 1)[None, :, 20:], key[None], value[None]
    expected = attention_with_scores(*states, causal(*states[:2]), spec)
    return all(
        torch.allclose(
            actual_tensor.flatten().float(), expected_tensor.flatten().float(), atol=3e-2, rtol=3e-2
        )
        for actual_tensor, expected_tensor in zip(actual, expected, strict=True)
    )
