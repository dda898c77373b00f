"""Attention with score sums, block by block: exact and linear in memory."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# The CPU computes 2 ** x four times as fast as e ** x.
_LOG2_E = math.log2(math.e)
_TILE_ROWS, _TILE_KEYS = 128, 2048
"""A tile of fp32 logits takes 1 MiB, about the cache that a core has to itself."""
_TILES_PER_THREAD = 2
"""More than one, so that threads that finish early find something to do."""
_SCRATCH_ELEMENTS = 1 << 23
"""All tiles of one block of queries take at most 32 MiB, if need be with fewer rows."""
_LOWEST = -1e30
"""In place of -inf for the maximum of what sees nothing, so that no inf - inf arises."""


@dataclass(frozen=True)
class Visibility:
    """Which keys a block's queries see, in O(T) numbers.

    Attributes:
        past: number of leading keys that are kept entries; every query sees them.
        entries: bool, broadcastable to ``[B, H, N]``: keys that are entries (not empty slots, not
            padding); ``None`` if all are.
        queries: bool ``[B, T]``: queries that are real tokens; ``None`` if all are. The keys of
            the other tokens are no entries.
        window: if given, a query sees only this many newest keys up to itself (sliding window).
    """

    past: int = 0
    entries: Tensor | None = None
    queries: Tensor | None = None
    window: int | None = None


def blockwise_attention_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends over kept entries and the block itself, by tiles.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]`` with N = past + T. Keys that are no entries must be finite, unless
            ``visibility.queries`` leaves them out.
        value: ``[B, H, N, Dv]``, likewise: their probability is zero, but zero times NaN is NaN.
        visibility: who sees what; query i sees the past and the block's keys up to i.
        scale: factor on the logits.
        softcap: as in `reference.attention_with_scores`.
        weights: as in `reference.attention_with_scores`.

    Returns:
        ``(output, sums)`` as in `reference.attention_with_scores`, computed in fp32. The output's
        memory is laid out as ``[B, T, HQ, Dv]``, which is what the model makes of it.
    """
    batch, num_heads, length, _ = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    real = visibility.queries
    make = query.new_empty if real is None else query.new_zeros
    output = make(batch, length, num_heads, value.shape[-1]).transpose(1, 2)
    grouped_query = query.unflatten(1, (num_kv_heads, -1))
    grouped_output = output.unflatten(1, (num_kv_heads, -1))
    sums = torch.zeros(batch, num_kv_heads, num_keys, dtype=torch.float32, device=query.device)
    bias = None
    if visibility.entries is not None:
        bias = torch.zeros_like(sums).masked_fill_(~visibility.entries, -torch.inf)
    for row in range(batch):
        q, k, v, out, total = (t[row] for t in (grouped_query, key, value, grouped_output, sums))
        row_bias = None if bias is None else bias[row]
        row_weights = None if weights is None else weights[row]
        if real is None:
            _attend_row(out, total, q, k, v, row_bias, row_weights, visibility, scale, softcap)
            continue
        # A row runs alone over its real tokens: its padding costs nothing and cannot leak.
        own = real[row].nonzero().squeeze(1)
        if len(own) == 0:
            continue
        seen = torch.cat([torch.arange(visibility.past, device=own.device), visibility.past + own])
        own_output, own_sums = out[:, :, own], total[:, seen]
        row_bias = None if row_bias is None else row_bias[:, seen]
        row_weights = None if row_weights is None else row_weights[own]
        _attend_row(
            own_output, own_sums, q[:, :, own], k[:, seen], v[:, seen],
            row_bias, row_weights, visibility, scale, softcap,
        )  # fmt: skip
        out[:, :, own], total[:, seen] = own_output, own_sums
    return output, sums


def _attend_row(
    output: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    visibility: Visibility,
    scale: float,
    softcap: float | None,
) -> None:
    """One sequence: some heads at a time, in fp32.

    A copy in fp32 of all heads would be twice as large as a block of bf16.

    Args:
        output: ``[H, G, T, Dv]``; mutated.
        sums: ``[H, N]``, zero; mutated.
        query: ``[H, G, T, D]``.
        key: ``[H, N, D]``.
        value: ``[H, N, Dv]``.
        bias: ``[H, N]``, added to the logits, or ``None``.
        weights: fp32 ``[T]``, what a query's attention counts for in the sums; ``None`` for one.
        visibility: ``past`` and ``window`` count here.
        scale: factor on the logits.
        softcap: soft cap of the logits or ``None``.
    """
    count = key.shape[0]
    if query.device.type == "cpu":
        count = _TILES_PER_THREAD * torch.get_num_threads()
    for start in range(0, key.shape[0], count):
        at = slice(start, start + count)
        _attend_heads(
            output[at], sums[at],
            query[at].float() * (scale / softcap if softcap else scale * _LOG2_E),
            key[at].float(), value[at].float(), None if bias is None else bias[at].unsqueeze(1),
            weights, visibility.past, visibility.window, softcap,
        )  # fmt: skip


def _attend_heads(
    output: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    past: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """The tiles of some heads; arguments as in `_attend_row`, scaled, bias ``[h, 1, N]``."""
    heads, groups, length, _ = query.shape
    num_keys, size = key.shape[1], value.shape[2]
    rows = max(1, min(_TILE_ROWS, _SCRATCH_ELEMENTS // (heads * num_keys)) // groups)
    scratch = query.new_empty(min(rows, length) * groups * heads * num_keys)
    for top in range(0, length, rows):
        bottom = min(top + rows, length)
        height = groups * (bottom - top)
        some_queries = query[:, :, top:bottom].reshape(heads, height, -1)
        highest = query.new_full((heads, height, 1), _LOWEST)
        total = torch.zeros_like(highest)
        mixed = query.new_zeros(heads, height, size)
        first = 0 if window is None else max(0, past + top - window + 1)
        tiles = []
        for columns in _slices(first, past + bottom):
            width = columns.stop - columns.start
            offset = heads * height * (columns.start - first)
            tile = scratch[offset : offset + heads * height * width].view(heads, height, width)
            some_keys = key[:, columns].transpose(1, 2)
            if bias is None or softcap is not None:
                torch.bmm(some_queries, some_keys, out=tile)
            else:
                torch.baddbmm(bias[:, :, columns], some_queries, some_keys, out=tile)
            if softcap is not None:
                tile.tanh_().mul_(softcap * _LOG2_E)
                if bias is not None:
                    tile += bias[:, :, columns]
            _hide(tile.unflatten(1, (groups, -1)), columns, past + top, past + bottom, window)
            higher = torch.maximum(highest, tile.amax(dim=-1, keepdim=True))
            tile.sub_(higher).exp2_()
            fade = torch.exp2(highest - higher)
            total.mul_(fade).add_(tile.sum(dim=-1, keepdim=True))
            mixed.mul_(fade).baddbmm_(tile, value[:, columns])
            tiles.append((columns, tile, higher))
            highest = higher
        # A row that sees nothing has a sum of zero: the limit makes its output zero, not NaN.
        factor = total.clamp_(min=torch.finfo(total.dtype).tiny).reciprocal_()
        output[:, :, top:bottom] = mixed.mul_(factor).unflatten(1, (groups, -1))
        if weights is not None:
            factor = factor * weights[top:bottom].repeat(groups).unsqueeze(1)
        for columns, tile, reference in tiles:
            shares = torch.exp2(reference - highest).mul_(factor).transpose(1, 2)
            sums[:, columns] += torch.bmm(shares, tile).squeeze(1)


def _slices(start: int, stop: int) -> Iterator[slice]:
    """Cuts a range of keys into tiles."""
    for left in range(start, stop, _TILE_KEYS):
        yield slice(left, min(left + _TILE_KEYS, stop))


def _hide(tile: Tensor, columns: slice, first: int, last: int, window: int | None) -> None:
    """Adds -inf where a query must not look: the future, and what its window has left behind.

    Args:
        tile: logits ``[h, G, rows, width]``; mutated.
        columns: the keys of the tile.
        first: the key of the first query itself.
        last: one past the key of the last query.
        window: as in `Visibility`.
    """
    own = torch.arange(first, last, device=tile.device).unsqueeze(1)
    # Most columns are seen by all rows; only the others are touched.
    begin = max(columns.start, first + 1)
    if begin < columns.stop:
        future = torch.arange(begin, columns.stop, device=tile.device) > own
        tile[..., begin - columns.start :] += _minus_infinity(future)
    if window is not None and columns.start < last - window:
        end = min(columns.stop, last - window)
        gone = torch.arange(columns.start, end, device=tile.device) <= own - window
        tile[..., : end - columns.start] += _minus_infinity(gone)


def _minus_infinity(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


_ROWS = 64


def score_sums(
    query: Tensor,
    key: Tensor,
    log_sum_exp: Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
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


def entries_of(visibility: Visibility, like: Tensor) -> Tensor | None:
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


_MIN_BLOCK, _MAX_BLOCK = 64, 512


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    window: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
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


def applies(query: Tensor, value: Tensor, visibility: Visibility, softcap: float | None) -> bool:
    """Says whether `forward` can do a block.

    Args:
        query: ``[B, HQ, T, D]``.
        value: ``[B, H, N, Dv]``.
        visibility: who sees what.
        softcap: soft cap of the logits or ``None``.
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
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float
) -> tuple[Tensor, Tensor]:
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
