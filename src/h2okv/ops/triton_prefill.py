"""A block's attention and score sums as Triton kernels.

Twins: `blockwise_attention_with_scores` and `expected_attention` of `h2okv.ops.attention`.
A fused forward pass keeps the log-sum-exp of every row; a second kernel without values makes the
probabilities again, for one tile of keys after the other, and adds up their columns. No sum is
shared between programs, so the results are the same in every run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2okv.ops import flash_varlen
from h2okv.ops.flash import add_sink
from h2okv.ops.reference import AttentionSpec, Visibility
from h2okv.ops.rope import Layout
from h2okv.ops.triton_decode import number, side

_LOG2_E = math.log2(math.e)
_LN_2 = tl.constexpr(math.log(2.0))
_ROTATED_QUERIES = 32  # of a program that rotates them
# Replaces -inf as the maximum of a row that sees nothing: inf - inf would be NaN.
_LOWEST = tl.constexpr(-1e30)


class Tile(NamedTuple):
    """How a kernel cuts up its work."""

    queries: int  # rows of a tile
    keys: int  # columns of a tile
    num_warps: int  # groups of 32 threads that share a tile
    num_stages: int  # tiles being loaded while one is worked on


@triton.jit
def _logits(query, key, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Logits times log2(e): ``query [M, D]``, ``key [D, N]`` to ``[M, N]``."""
    logits = tl.dot(query, key, input_precision=PRECISION)
    if HAS_SOFTCAP:
        # scale holds 1 / softcap, softcap the factor log2(e).
        return (2.0 * tl.sigmoid(2.0 * logits * number(scale)) - 1.0) * number(softcap)
    return logits * number(scale)


@triton.jit
def _forward(
    query, key, value, entries, real, output, log_sum_exp,
    query_b, query_h, query_t, key_b, key_h, key_n, value_b, value_h, value_n,
    output_b, output_h, output_t, length, num_keys, past, scale, softcap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_ENTRIES: tl.constexpr, HAS_REAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax of a tile of queries over the keys that they see."""
    # The last queries see most: they go first, and short programs fill what is left.
    top = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = (tl.program_id(1) // (HEADS * GROUPS)).to(tl.int64)
    query_head = tl.program_id(1) % (HEADS * GROUPS)
    head = query_head // GROUPS
    rows, numbers = top + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    wide = tl.arange(0, BLOCK_DV)
    is_row = rows < length
    if HAS_REAL:
        is_row = is_row & (tl.load(real + batch * length + rows, mask=is_row, other=0) != 0)
    some_queries = tl.load(
        query + batch * query_b + query_head * query_h + rows.to(tl.int64)[:, None] * query_t
        + numbers[None, :],
        mask=is_row[:, None] & (numbers < D)[None, :], other=0.0,
    )  # fmt: skip
    key_base = key + batch * key_b + head * key_h
    value_base = value + batch * value_b + head * value_h
    entry_base = entries + (batch * HEADS + head) * num_keys
    highest = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Queries behind all keys (`past` is their number) see no other.
    last = tl.minimum(past + tl.minimum(top + BLOCK_M, length), num_keys)
    # Tiles whose keys all queries see come first, and need no comparison.
    edge = tl.minimum(past + top + 1, last) // BLOCK_N * BLOCK_N
    for COMPARES in tl.static_range(2):
        for start in range(edge if COMPARES else 0, last if COMPARES else edge, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            inside = columns < last
            if HAS_ENTRIES:
                inside = inside & (tl.load(entry_base + columns, mask=inside, other=0) != 0)
            some_keys = tl.load(
                key_base + columns.to(tl.int64)[None, :] * key_n + numbers[:, None],
                mask=inside[None, :] & (numbers < D)[:, None], other=0.0,
            )  # fmt: skip
            logits = _logits(some_queries, some_keys, scale, softcap, HAS_SOFTCAP, PRECISION)
            if HAS_ENTRIES or COMPARES:
                visible = inside[None, :]
                if COMPARES:
                    visible = visible & (columns[None, :] <= past + rows[:, None])
                logits = tl.where(visible, logits, -float("inf"))
            higher = tl.maximum(highest, tl.max(logits, axis=1))
            weights = tl.exp2(logits - higher[:, None])
            fade = tl.exp2(highest - higher)
            total = total * fade + tl.sum(weights, axis=1)
            if DV > 0:
                some_values = tl.load(
                    value_base + columns.to(tl.int64)[:, None] * value_n + wide[None, :],
                    mask=inside[:, None] & (wide < DV)[None, :], other=0.0,
                )  # fmt: skip
                mixed = mixed * fade[:, None]
                mixed += tl.dot(
                    weights.to(some_values.dtype), some_values, input_precision=PRECISION
                )
            highest = higher
    sees = (total > 0.0) & is_row
    safe = tl.where(sees, total, 1.0)
    if DV > 0:
        mixed = tl.where(sees[:, None], mixed / safe[:, None], 0.0)
        tl.store(
            output + batch * output_b + query_head * output_h
            + rows.to(tl.int64)[:, None] * output_t + wide[None, :],
            mixed.to(output.dtype.element_ty), mask=(rows < length)[:, None] & (wide < DV)[None, :],
        )  # fmt: skip
    # A row that sees nothing adds nothing to the scores.
    limit = tl.where(sees, (highest + tl.log2(safe)) * _LN_2, float("inf"))
    row = tl.program_id(1).to(tl.int64)
    tl.store(log_sum_exp + row * length + rows, limit, mask=rows < length)


@triton.jit
def _sums(
    query, key, entries, log_sum_exp, shares, sums,
    query_b, query_h, query_t, key_b, key_h, key_n,
    length, num_keys, past, scale, softcap, log2_e,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, HAS_ENTRIES: tl.constexpr,
    HAS_SHARES: tl.constexpr, SQUARES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the probabilities that a tile of keys receives from the queries that see it."""
    begin = tl.program_id(0) * BLOCK_N
    batch = (tl.program_id(1) // (HEADS * GROUPS)).to(tl.int64)
    query_head = tl.program_id(1) % (HEADS * GROUPS)
    head = query_head // GROUPS
    columns, numbers = begin + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = columns < num_keys
    if HAS_ENTRIES:
        at = entries + (batch * HEADS + head) * num_keys + columns
        inside = inside & (tl.load(at, mask=inside, other=0) != 0)
    some_keys = tl.load(
        key + batch * key_b + head * key_h + columns.to(tl.int64)[:, None] * key_n
        + numbers[None, :],
        mask=inside[:, None] & (numbers < D)[None, :], other=0.0,
    )  # fmt: skip
    query_base = query + batch * query_b + query_head * query_h
    limit_base = log_sum_exp + tl.program_id(1).to(tl.int64) * length
    share_base = shares + batch * length
    received = tl.zeros([BLOCK_N], tl.float32)
    # The first query that sees any of these keys; the tile of its neighbours begins with it.
    first = tl.maximum(0, (begin - past) // BLOCK_M * BLOCK_M)
    # Tiles whose queries all see all of these keys come last, and need no comparison.
    first_behind = tl.maximum(0, begin + BLOCK_N - 1 - past)
    edge = tl.minimum(length, (first_behind + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    for SEES_ALL in tl.static_range(2):
        for top in range(
            tl.maximum(first, edge) if SEES_ALL else first, length if SEES_ALL else edge, BLOCK_M
        ):
            rows = top + tl.arange(0, BLOCK_M)
            limit = tl.load(limit_base + rows, mask=rows < length, other=float("inf"))
            some_queries = tl.load(
                query_base + rows.to(tl.int64)[None, :] * query_t + numbers[:, None],
                mask=(rows < length)[None, :] & (numbers < D)[:, None], other=0.0,
            )  # fmt: skip
            logits = _logits(some_keys, some_queries, scale, softcap, HAS_SOFTCAP, PRECISION)
            weights = tl.exp2(logits - (limit * number(log2_e))[None, :])
            if SQUARES:
                weights = weights * weights
            if HAS_SHARES:
                share = tl.load(share_base + rows, mask=rows < length, other=0.0)
                weights = weights * share[None, :]
            # A query that is padding may be NaN; the load does not wait to find out.
            visible = (limit < float("inf"))[None, :]
            if not SEES_ALL:
                visible = visible & (columns[:, None] <= past + rows[None, :])
            received += tl.sum(tl.where(visible, weights, 0.0), axis=1)
    received = tl.where(inside, received, 0.0)
    if SQUARES and GROUPS == 1:  # of several heads the squares are still to be added
        received = tl.sqrt_rn(received)
    row = tl.program_id(1).to(tl.int64)
    tl.store(sums + row * num_keys + columns, received, mask=columns < num_keys)


@triton.jit
def _rotate(
    query, factors, output, query_b, query_h, query_t, factors_b, factors_t, factors_p, factors_c,
    length, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of a tile of queries; the other numbers pass."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    row = tl.program_id(1).to(tl.int64)
    batch, head, pair = row // HEADS, row % HEADS, tl.arange(0, BLOCK_P)[None, :]
    inside = (rows < length) & (pair < PAIRS)
    first = pair if HALVES else 2 * pair
    second = first + (PAIRS if HALVES else 1)
    source = query + batch * query_b + head * query_h + rows * query_t
    target = output + (row * length + rows) * D
    at = factors + batch * factors_b + rows * factors_t + pair * factors_p
    cosine = tl.load(at, mask=inside, other=0.0)
    sine = tl.load(at + factors_c, mask=inside, other=0.0)
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first, (a * cosine - b * sine).to(output.dtype.element_ty), mask=inside)
    tl.store(target + second, (b * cosine + a * sine).to(output.dtype.element_ty), mask=inside)
    if BLOCK_R > 0:
        others = 2 * PAIRS + tl.arange(0, BLOCK_R)[None, :]
        inside = (rows < length) & (others < D)
        passing = tl.load(source + others, mask=inside, other=0.0)
        tl.store(target + others, passing.to(output.dtype.element_ty), mask=inside)


def attention_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    spec: AttentionSpec,
    weights: Tensor | None = None,
    needs_sums: bool = True,
    *,
    uses_flash: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attends over kept entries and the block itself, and sums the columns if they are needed."""
    assert spec.window is spec.reach is None, "no layer with entries asks for it"
    if uses_flash and flash_varlen.applies(query, value, visibility, spec):
        output, log_sum_exp = flash_varlen.forward(query, key, value, spec.scale)
    else:
        output, log_sum_exp = forward(query, key, value, visibility, spec)
    if spec.sinks is not None:
        output, log_sum_exp = add_sink(output, log_sum_exp, spec.sinks)
    if not needs_sums:
        return output, None
    return output, score_sums(query, key, log_sum_exp, visibility, spec, weights)


def expected_attention(
    query: Tensor,
    key: Tensor,
    entries: Tensor | None,
    queries: Tensor | None,
    spec: AttentionSpec,
    rotation: tuple[Tensor, Layout] | None = None,
) -> Tensor:
    """Lets every query attend to all entries; twin of `h2okv.ops.attention.expected_attention`."""
    query = query.to(key.dtype) if rotation is None else rotated(query, *rotation, key.dtype)
    visibility = Visibility(key.shape[2], entries, queries)
    _, log_sum_exp = forward(query, key, None, visibility, spec)
    if spec.sinks is not None:
        log_sum_exp = torch.logaddexp(log_sum_exp, spec.sinks.float().view(1, -1, 1))
    return score_sums(query, key, log_sum_exp, visibility, spec, squares=True)


def rotated(query: Tensor, factors: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return `h2okv.ops.rope.rotate` in a dtype, contiguous."""
    query = _rows_whole(query)
    batch, num_heads, length, size = query.shape
    output = query.new_empty(query.shape, dtype=dtype)
    factors = factors.expand(batch, 1, length, -1, 2)
    pairs = factors.shape[3]
    _rotate[(triton.cdiv(length, _ROTATED_QUERIES), batch * num_heads)](
        query, factors, output, *query.stride()[:3], factors.stride(0), *factors.stride()[2:],
        length, HEADS=num_heads, D=size, PAIRS=pairs, HALVES=layout == "half",
        BLOCK_P=triton.next_power_of_2(pairs), BLOCK_R=triton.next_power_of_2(size - 2 * pairs),
        BLOCK_M=_ROTATED_QUERIES,
    )  # fmt: skip
    return output


def forward(
    query: Tensor, key: Tensor, value: Tensor | None, visibility: Visibility, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Fused attention that keeps the log-sum-exp of each row.

    Arguments as in `h2okv.ops.attention.blockwise_attention_with_scores`, but that keys and values
    which are no entries may be anything, and that without values the output means nothing.

    Returns:
        ``(output, log_sum_exp)``: ``[B, HQ, T, Dv]`` in the query's dtype, laid out as
        ``[B, T, HQ, Dv]``, and fp32 ``[B, HQ, T]``, natural, inf where a query sees nothing.
    """
    query, key = _rows_whole(query), _rows_whole(key)
    value_size = 0 if value is None else value.shape[3]
    value = key if value is None else _rows_whole(value)
    batch, num_heads, length, size = query.shape
    real = visibility.queries
    tile = _forward_tile(max(size, value_size), query.dtype)
    output = query.new_empty(batch, length, num_heads, value_size).transpose(1, 2)
    limits = query.new_empty((batch, num_heads, length), dtype=torch.float32)
    entries, numbers, constants = _shared_arguments(query, key, visibility, spec)
    _forward[(triton.cdiv(length, tile.queries), batch * num_heads)](
        query, key, value, limits if entries is None else entries,
        limits if real is None else _as_bytes(real), output, limits,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        *numbers, DV=value_size, HAS_REAL=real is not None, BLOCK_DV=side(value_size),
        **constants, **_launch(tile),
    )  # fmt: skip
    return output, limits


def score_sums(
    query: Tensor,
    key: Tensor,
    log_sum_exp: Tensor,
    visibility: Visibility,
    spec: AttentionSpec,
    weights: Tensor | None = None,
    tile: Tile | None = None,
    squares: bool = False,
) -> Tensor:
    """Sum the probability that each key received, fp32 ``[B, H, N]``; `tile` is for tuning.

    With `squares`, the root of the sum of squares.
    """
    query, key = _rows_whole(query), _rows_whole(key)
    batch, num_heads, num_keys = *query.shape[:2], key.shape[2]
    tile = tile or _sums_tile(query.shape[3], query.dtype)
    sums = query.new_empty((batch, num_heads, num_keys), dtype=torch.float32)
    entries, numbers, constants = _shared_arguments(query, key, visibility, spec)
    _sums[(triton.cdiv(num_keys, tile.keys), batch * num_heads)](
        query, key, sums if entries is None else entries, log_sum_exp.contiguous(),
        sums if weights is None else weights.contiguous(), sums,
        *query.stride()[:3], *key.stride()[:3], *numbers, _LOG2_E,
        HAS_SHARES=weights is not None, SQUARES=squares, **constants, **_launch(tile),
    )  # fmt: skip
    if num_heads == key.shape[1]:
        return sums
    # Each query head has its own row, no two programs add to one number.
    sums = sums.unflatten(1, (key.shape[1], -1)).sum(dim=2)
    return sums.sqrt_() if squares else sums


def _forward_tile(size: int, dtype: torch.dtype) -> Tile:
    """Return the tile that fits the registers and 96 KiB of shared memory of small cards."""
    if dtype == torch.float32:
        return Tile(64, 32, 4, 1) if size <= 128 else Tile(16, 16, 4, 1)
    if size <= 64:
        return Tile(128, 64, 4, 3)
    return Tile(128, 64, 8, 2) if size <= 128 else Tile(64, 32, 8, 2)


def _sums_tile(size: int, dtype: torch.dtype) -> Tile:
    """Return the tile of the second kernel, where keys stay in registers and queries pass by."""
    if dtype == torch.float32:
        return Tile(32, 64, 4, 2) if size <= 64 else Tile(16, 32, 4, 2)
    if size <= 64:
        return Tile(64, 128, 4, 3)
    return Tile(64, 128, 8, 3) if size <= 128 else Tile(32, 64, 4, 2)


def _launch(tile: Tile) -> dict[str, int]:
    queries, keys, num_warps, num_stages = tile
    return {"BLOCK_M": queries, "BLOCK_N": keys, "num_warps": num_warps, "num_stages": num_stages}


def _shared_arguments(
    query: Tensor, key: Tensor, visibility: Visibility, spec: AttentionSpec
) -> tuple[Tensor | None, tuple[float, ...], dict[str, Any]]:
    """Return what both kernels take: keys that are entries, as bytes, numbers, constants."""
    (_, num_heads, length, size), (batch, heads, num_keys) = query.shape, key.shape[:3]
    entries, queries, (scale, softcap, *_) = visibility.entries, visibility.queries, spec
    if entries is None and queries is not None and visibility.past < num_keys:
        before = queries.new_ones(batch, visibility.past)
        entries = torch.cat([before, queries], dim=1).unsqueeze(1)
    if entries is not None:
        entries = _as_bytes(entries.expand(batch, heads, num_keys))
    # The factor of `_logits`, which yields powers of two.
    factors = (scale * _LOG2_E, 1.0) if softcap is None else (scale / softcap, softcap * _LOG2_E)
    constants = {
        "HEADS": heads, "GROUPS": num_heads // heads, "D": size, "BLOCK_D": side(size),
        "HAS_ENTRIES": entries is not None, "HAS_SOFTCAP": softcap is not None,
        # Products of fp32 in three parts, which is as exact as fp32; others are exact in fp32.
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    return entries, (length, num_keys, visibility.past, *factors), constants


def _as_bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


def _rows_whole(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()
