"""Attention with score sums in O(T) memory, by tiles: any device, any visibility.

For a block of queries the tiles of logits over all its keys are made one after the other, with a
running maximum and sum as in online softmax; each is turned into exponentials and multiplied with
the values while it is in a core's cache. When the rows' sums are known, the tiles' columns are
added up with these as weights. Every logit is computed once, which on a CPU is faster than a fused
kernel followed by a second pass for the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

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
    entries: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    window: int | None = None


def blockwise_attention_with_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
    scale: float,
    softcap: float | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    output: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
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
    output: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
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


def _hide(tile: torch.Tensor, columns: slice, first: int, last: int, window: int | None) -> None:
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


def _minus_infinity(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
