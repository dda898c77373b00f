"""Triton kernels of the decode step."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2okv.ops.decode import Slots, StepRules, evict_one, keep_query, rank_new
from h2okv.ops.indexed import Indexed

# What a program of the first kernel reads at a time, in the dtype that it computes with.
_BLOCK_BYTES = 32 << 10
# Slots of which a program of the second kernel reads single numbers at a time, and numbers of the
# parts that it puts together at a time.
_FINISH_SLOTS, _FINISH_NUMBERS = 1024, 8192
_PROGRAMS_PER_CORE = 4  # fewer leave the memory idle between two loads
# Replaces -inf as the maximum of a row that sees nothing: inf - inf would be NaN.
_NOTHING = tl.constexpr(-1e30)
_TINY, _LARGEST = (
    tl.constexpr(getattr(torch.finfo(torch.float32), name)) for name in ("tiny", "max")
)
_MARKS = 256  # slots of a shared row of which programs look up the heads first


@triton.jit
def number(value):
    """Return a number as fp32: compiled models pass Python's numbers as fp64."""
    return tl.full([], value, tl.float32)


@triton.jit
def _capped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    if HAS_SOFTCAP:
        cap = number(softcap)
        scores = (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0) * cap
    return scores


@triton.jit
def _first_slot(heads, head, num_slots, STRIDE: tl.constexpr, MARKS: tl.constexpr):
    """Count the slots of a shared row that come before those of a head; their heads ascend."""
    marks = tl.arange(0, MARKS) * STRIDE
    is_before = tl.load(heads + marks, mask=marks < num_slots, other=255).to(tl.int32) < head
    start = tl.maximum(tl.sum(is_before.to(tl.int32), axis=0) - 1, 0) * STRIDE
    slots = start + tl.arange(0, STRIDE)
    is_before = tl.load(heads + slots, mask=slots < num_slots, other=255).to(tl.int32) < head
    return start + tl.sum(is_before.to(tl.int32), axis=0)


@triton.jit
def _slots_of(
    heads, heads_b, row, num_slots,
    HEADS: tl.constexpr, SHARED: tl.constexpr, STRIDE: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """Return the row of slots that a KV head has or shares, and its first and last slot there.

    Also how many slots of the same sequence come before that row.
    """
    offset, first, end = (row % HEADS) * num_slots, 0, num_slots
    if SHARED:
        batch, head = row // HEADS, (row % HEADS).to(tl.int32)
        heads += batch * heads_b
        first = _first_slot(heads, head, num_slots, STRIDE, MARKS)
        end = _first_slot(heads, head + 1, num_slots, STRIDE, MARKS)
        row, offset = batch, 0
    return row, first, end, offset


@triton.jit
def _attend(
    query, new_key, new_value, keys, values, blocks, scores, positions, weights, heads,
    free, seen, real, factors, ranks, queries, query_positions, placed,
    logits, tops, totals, mixed, newest,
    query_b, query_h, key_b, key_h, value_b, value_h, keys_b, values_b, queries_b, placed_b,
    scores_b, positions_b, weights_b, heads_b, free_b,
    num_slots, split_size, span, scale, softcap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, IN_BLOCKS: tl.constexpr, HAS_REAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SHARED: tl.constexpr, WEIGHS: tl.constexpr,
    KEEPS_LOGITS: tl.constexpr, CHOOSES: tl.constexpr, PRECISION: tl.constexpr,
    MEANS: tl.constexpr, HAS_PLACES: tl.constexpr, HAS_PLACED: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr, STRIDE: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    row = row.to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    block, sequence = batch, batch
    if HAS_BLOCKS:
        block = tl.load(blocks + batch)
    if IN_BLOCKS:
        sequence = block
    num_seen = tl.load(seen + batch)
    position, last_position = num_seen.to(tl.int32), num_seen.to(tl.int32)
    if HAS_REAL:
        is_real = tl.load(real + batch) != 0
        last_position = tl.where(is_real, position, position - 1)
        position = tl.where(is_real, position, -1)
    slot_row, begin, end, offset = _slots_of(
        heads, heads_b, row, num_slots, HEADS, SHARED, STRIDE, MARKS
    )
    slot = tl.load(free + sequence * free_b + head).to(tl.int64)
    if IN_BLOCKS:  # padding of a batch has a block too, of any numbers
        slot = tl.maximum(tl.minimum(slot, end - 1), begin)
    first = begin + split * split_size
    last = tl.minimum(first + split_size, end)
    base = slot_row * num_slots
    scores += sequence * scores_b + offset
    positions += sequence * positions_b + offset
    weights += sequence * weights_b + offset
    group = tl.arange(0, BLOCK_G)
    # The numbers of a head that do not rotate; all of them when positions stay (R = 0).
    plain = R + tl.arange(0, BLOCK_D)
    output = tl.arange(0, BLOCK_DV)
    some_queries = group[:, None] < GROUPS
    query_row = query + batch * query_b + (head * GROUPS + group)[:, None] * query_h
    key_row = new_key + batch * key_b + head * key_h
    value_row = new_value + batch * value_b + head * value_h
    added_value = tl.load(value_row + output, mask=output < DV, other=0.0)
    owns = (slot >= first) & (slot < last)
    keys += block * keys_b + offset * D
    values += block * values_b + offset * DV
    tl.store(positions + slot, position, mask=owns)
    tl.store(scores + slot, 0.0, mask=owns)
    if WEIGHS:
        norm = tl.sum(tl.abs(added_value.to(tl.float32)), axis=0)
        tl.store(weights + slot, tl.maximum(norm, _TINY), mask=owns)
    tl.store(values + slot * DV + output, added_value, mask=(output < DV) & owns)
    logit = tl.zeros([BLOCK_G], tl.float32)
    if R < D:
        plain_query = tl.load(
            query_row + plain[None, :], mask=some_queries & (plain < D)[None, :], other=0.0
        )
        plain_added = tl.load(key_row + plain, mask=plain < D, other=0.0)
        tl.store(keys + slot * D + plain, plain_added, mask=(plain < D) & owns)
        products = plain_query.to(tl.float32) * plain_added.to(tl.float32)[None, :]
        logit += tl.sum(products, axis=1)
    if R > 0:
        pair = tl.arange(0, BLOCK_R)
        is_pair = pair < R // 2
        pairs = some_queries & is_pair[None, :]
        even_query = tl.load(query_row + 2 * pair[None, :], mask=pairs, other=0.0).to(tl.float32)
        odd_query = tl.load(query_row + 2 * pair[None, :] + 1, mask=pairs, other=0.0).to(tl.float32)
        even_added = tl.load(key_row + 2 * pair, mask=is_pair, other=0.0)
        odd_added = tl.load(key_row + 2 * pair + 1, mask=is_pair, other=0.0)
        tl.store(keys + slot * D + 2 * pair, even_added, mask=is_pair & owns)
        tl.store(keys + slot * D + 2 * pair + 1, odd_added, mask=is_pair & owns)
        new_rotation = factors + tl.load(ranks + base + slot) * R + 2 * pair
        new_real = tl.load(new_rotation, mask=is_pair, other=0.0)
        new_imaginary = tl.load(new_rotation + 1, mask=is_pair, other=0.0)
        even_added, odd_added = even_added.to(tl.float32), odd_added.to(tl.float32)
        turned = even_query * (even_added * new_real - odd_added * new_imaginary)[None, :]
        turned += odd_query * (even_added * new_imaginary + odd_added * new_real)[None, :]
        logit += tl.sum(turned, axis=1)
    # The first program starts with the new entry, by its arguments: its slot, which all pass over,
    # may not have been written yet.
    has_new = (split == 0) & (position >= 0)
    if MEANS > 0:  # noqa: SIM102 - decided when the kernel is compiled
        if has_new:
            column = num_seen % span
            for index in tl.static_range(MEANS):
                # As many query heads as `tensor_split` gives to each mean.
                larger: tl.constexpr = GROUPS % MEANS
                size: tl.constexpr = GROUPS // MEANS + (1 if index < larger else 0)
                before: tl.constexpr = index * (GROUPS // MEANS) + min(index, larger)
                is_of = (group >= before) & (group < before + size)
                sums = tl.sum(tl.where(is_of[:, None], plain_query.to(tl.float32), 0.0), axis=0)
                entry = (head * MEANS + index) * span + column
                tl.store(
                    queries + block * queries_b + entry * D + plain,
                    (sums / size).to(queries.dtype.element_ty), mask=plain < D,
                )  # fmt: skip
            if HAS_PLACES:
                placed_at = 0
                if HAS_PLACED:
                    placed_at = tl.load(placed + batch * placed_b)
                tl.store(query_positions + batch * span + column, placed_at, mask=head == 0)
    logit = _capped(logit * number(scale), softcap, HAS_SOFTCAP)
    logit = tl.where(has_new, logit, -float("inf"))
    rows_of_logits = logits + (slot_row * GROUPS + group) * num_slots
    if KEEPS_LOGITS:
        tl.store(rows_of_logits + slot, logit, mask=(group < GROUPS) & (split == 0))
    top = tl.maximum(logit, _NOTHING)
    total = tl.exp(logit - top)
    mix = total[:, None] * tl.where(has_new, added_value.to(tl.float32), 0.0)[None, :]
    for start in range(first, last, BLOCK_S):
        slots = start + tl.arange(0, BLOCK_S)
        inside = (slots < last) & (slots != slot)
        is_entry = tl.load(positions + slots, mask=inside, other=-1) >= 0
        entries = slots[:, None]
        scaled = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
        if R < D:
            seen_key = is_entry[:, None] & (plain < D)[None, :]
            key = tl.load(keys + entries * D + plain[None, :], mask=seen_key, other=0.0)
            scaled += tl.dot(
                plain_query, tl.trans(key.to(plain_query.dtype)), input_precision=PRECISION
            )
        if R > 0:
            rank = tl.load(ranks + base + slots, mask=is_entry, other=0)[:, None]
            seen_pairs = is_entry[:, None] & is_pair[None, :]
            key_pair = keys + entries * D + 2 * pair[None, :]
            even = tl.load(key_pair, mask=seen_pairs, other=0.0).to(tl.float32)
            odd = tl.load(key_pair + 1, mask=seen_pairs, other=0.0).to(tl.float32)
            rotation = factors + rank * R + 2 * pair[None, :]
            real_part = tl.load(rotation, mask=seen_pairs, other=0.0)
            imaginary = tl.load(rotation + 1, mask=seen_pairs, other=0.0)
            scaled += tl.dot(
                even_query, tl.trans(even * real_part - odd * imaginary), input_precision=PRECISION
            )
            scaled += tl.dot(
                odd_query, tl.trans(even * imaginary + odd * real_part), input_precision=PRECISION
            )
        scaled = _capped(scaled * number(scale), softcap, HAS_SOFTCAP)
        scaled = tl.where(is_entry[None, :], scaled, -float("inf"))
        if KEEPS_LOGITS:
            tl.store(
                rows_of_logits[:, None] + slots[None, :], scaled,
                mask=some_queries & inside[None, :],
            )  # fmt: skip
        higher = tl.maximum(top, tl.max(scaled, axis=1))
        shares = tl.exp(scaled - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(shares, axis=1)
        # What is no entry has weight zero, but zero times NaN would still be NaN.
        seen_value = is_entry[:, None] & (output < DV)[None, :]
        value = tl.load(values + entries * DV + output[None, :], mask=seen_value, other=0.0)
        value = value.to(added_value.dtype)
        mix = mix * fade[:, None]
        mix += tl.dot(shares.to(value.dtype), value, input_precision=PRECISION)
        top = higher
    if CHOOSES:
        tl.store(newest + row, last_position, mask=split == 0)
    num_splits = tl.num_programs(1)
    at = (row * GROUPS + group) * num_splits + split
    tl.store(tops + at, top, mask=group < GROUPS)
    tl.store(totals + at, total, mask=group < GROUPS)
    tl.store(
        mixed + at[:, None] * DV + output[None, :], mix,
        mask=some_queries & (output < DV)[None, :],
    )  # fmt: skip


@triton.jit
def _finish(
    output, scores, positions, weights, heads, blocks, free, seen, columns,
    real, slot_mask, ranks, sinks, recents, logits, tops, totals, mixed, newest, sink_logits,
    scores_b, positions_b, weights_b, heads_b, free_b, sinks_b, recents_b, num_slots, num_splits,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DV: tl.constexpr, HAS_REAL: tl.constexpr,
    IN_BLOCKS: tl.constexpr, HAS_SINK_LOGITS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_COLUMNS: tl.constexpr, ROLLS: tl.constexpr, SHARED: tl.constexpr,
    WEIGHS: tl.constexpr, ADDS: tl.constexpr, CHOOSES: tl.constexpr, APPENDS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr, STRIDE: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch = row // HEADS
    sequence = batch
    if IN_BLOCKS:
        sequence = tl.load(blocks + batch)
    free += sequence * free_b + row % HEADS
    count = 1
    if HAS_REAL:
        is_real = tl.load(real + batch) != 0
        count = is_real.to(tl.int32)
    # No program of this kernel reads what another one counts. A server counts by itself.
    if not IN_BLOCKS:
        tl.store(seen + batch, tl.load(seen + batch) + count, mask=row % HEADS == 0)
    if HAS_COLUMNS:
        tl.store(columns, tl.load(columns) + 1, mask=row == 0)
    if APPENDS:
        tl.store(free, tl.load(free) + count)
    group, split, wide = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_DV)
    some_queries = group < GROUPS
    at = (row * GROUPS + group)[:, None] * num_splits + split[None, :]
    has_split = some_queries[:, None] & (split < num_splits)[None, :]
    split_tops = tl.load(tops + at, mask=has_split, other=_NOTHING)
    top = tl.max(split_tops, axis=1)
    if HAS_SINK_LOGITS:
        sink_logit = tl.load(
            sink_logits + (row % HEADS) * GROUPS + group, mask=some_queries, other=_NOTHING
        ).to(tl.float32)
        top = tl.maximum(top, sink_logit)
    fades = tl.exp(split_tops - top[:, None])
    total = tl.sum(tl.load(totals + at, mask=has_split, other=0.0) * fades, axis=1)
    if HAS_SINK_LOGITS:
        total += tl.exp(sink_logit - top)
    # A sequence with nothing to see gives zeros.
    factor = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    mix = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    has_number = some_queries[:, None] & (wide < DV)[None, :]
    for start in range(0, num_splits, BLOCK_C):  # several at a time, as each round waits for loads
        some = start + tl.arange(0, BLOCK_C)
        source = (row * GROUPS + group)[:, None] * num_splits + some[None, :]
        is_part = some_queries[:, None] & (some < num_splits)[None, :]
        fade = tl.exp(tl.load(tops + source, mask=is_part, other=_NOTHING) - top[:, None])
        mixes = tl.load(
            mixed + source[:, :, None] * DV + wide[None, None, :],
            mask=is_part[:, :, None] & (wide < DV)[None, None, :], other=0.0,
        )  # fmt: skip
        mix += tl.sum(mixes * fade[:, :, None], axis=1)
    tl.store(
        output + (row * GROUPS + group)[:, None] * DV + wide[None, :],
        (mix * factor[:, None]).to(output.dtype.element_ty), mask=has_number,
    )  # fmt: skip
    if ADDS or CHOOSES:
        slot_row, first, end, offset = _slots_of(
            heads, heads_b, row, num_slots, HEADS, SHARED, STRIDE, MARKS
        )
        base = slot_row * num_slots
        scores += sequence * scores_b + offset
        positions += sequence * positions_b + offset
        weights += sequence * weights_b + offset
        stays_by = float("inf")
        if SHARED:
            stays_by = _LARGEST  # there a pinned entry stands behind a protected one
        if CHOOSES:
            last_position = tl.load(newest + row)
            recent = tl.load(recents + batch * recents_b).to(tl.int32)
            sink = 0
            if HAS_SINKS:
                sink = tl.load(sinks + batch * sinks_b).to(tl.int32)
        best_rank = tl.full([], float("inf"), tl.float32)
        best_position, best = tl.full([], 2147483647, tl.int32), tl.full([], 0, tl.int32)
        for start in range(first, end, BLOCK_S):
            slots = start + tl.arange(0, BLOCK_S)
            inside = slots < end
            score = tl.load(scores + slots, mask=inside, other=0.0)
            if ADDS:
                seen_by = some_queries[:, None] & inside[None, :]
                some_logits = tl.load(
                    logits + (slot_row * GROUPS + group)[:, None] * num_slots + slots[None, :],
                    mask=seen_by, other=-float("inf"),
                )  # fmt: skip
                added = tl.sum(tl.exp(some_logits - top[:, None]) * factor[:, None], axis=0)
                if HAS_REAL:
                    added = tl.where(is_real, added, 0.0)
                score += added
                tl.store(scores + slots, score, mask=inside)
            if CHOOSES:
                slot_positions = tl.load(positions + slots, mask=inside, other=-1)
                stays = slot_positions > last_position - recent
                if HAS_SINKS:
                    stays = stays | (slot_positions < sink)
                rank = score
                if WEIGHS:
                    rank *= tl.load(weights + slots, mask=inside, other=1.0)
                rank = tl.where(stays, stays_by, rank)
                rank = tl.where(slot_positions < 0, -float("inf"), rank)
                if HAS_MASK:
                    is_within = tl.load(slot_mask + base + slots, mask=inside, other=0) != 0
                    rank = tl.where(is_within, rank, float("inf"))
                # Slots beyond the last one never win.
                rank = tl.where(inside, rank, float("inf"))
                slot_positions = tl.where(inside, slot_positions, 2147483647)
                lowest = tl.min(rank, axis=0)
                oldest = tl.min(tl.where(rank == lowest, slot_positions, 2147483647), axis=0)
                is_oldest = (rank == lowest) & (slot_positions == oldest)
                leftmost = tl.min(tl.where(is_oldest, slots, 2147483647), axis=0)
                is_older = (lowest == best_rank) & (oldest < best_position)
                is_better = is_older | (lowest < best_rank)
                best = tl.where(is_better, leftmost, best)
                best_position = tl.where(is_better, oldest, best_position)
                best_rank = tl.where(is_better, lowest, best_rank)
        if CHOOSES:
            tl.store(positions + best, -1)
            tl.store(free, best.to(free.dtype.element_ty))
            if ROLLS:
                freed = tl.load(ranks + base + best)
                tl.debug_barrier()  # or a fast warp moves the rank that a slow one still reads
                for start in range(0, num_slots, BLOCK_S):
                    slots = start + tl.arange(0, BLOCK_S)
                    inside = slots < num_slots
                    rank = tl.load(ranks + base + slots, mask=inside, other=0)
                    rank = tl.where(rank > freed, rank - 1, rank)
                    rank = tl.where(slots == best, num_slots - 1, rank)
                    tl.store(ranks + base + slots, rank, mask=inside)


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Slots,
    rules: StepRules,
    real: Tensor | None = None,
    *,
    num_cores: int = 1,
) -> Tensor:
    """Run one token of each sequence through the slots, as `h2okv.ops.decode.decode_step`."""
    full = rules.full and real is None
    if rules.rotary is not None:  # the kernel sees queries at their ranks
        keep_query(query, key, slots, rules, real)
        rules = rules._replace(ring=None)
    query, rolled = rank_new(query, slots, rules, full, real)
    factors, ranks = (None, None) if rolled is None else rolled
    source: Any = slots
    blocks = source.keys.block_index if isinstance(source.keys, Indexed) else None
    fields = source.keys, source.values, source.scores, source.positions, source.free_slot
    memory = [field.blocks if isinstance(field, Indexed) else field for field in fields]
    chooses = rules.priority is None and rules.evicts
    queries, query_positions, placed = rules.ring or (None, None, None)
    # A compiled model calls what was compared with PyTorch here, and looks no further into it.
    in_blocks = isinstance(source.scores, Indexed)
    run: Any = functools.partial(launch, in_blocks=in_blocks, output=rules.output)
    if torch.compiler.is_compiling():
        run = torch.ops.h2okv.decode_step
    output: Tensor = run(
        query, key, value, *memory, slots.num_real_tokens, rules.columns, ranks, rules.weights,
        queries, query_positions, blocks, slots.head_of_slot, slots.slot_mask, factors, placed,
        real, rules.recent, rules.sink, rules.spec.sinks, rules.spec.scale, rules.spec.softcap,
        chooses, rules.evicts, rules.adds, rules.most_slots, num_cores,
    )  # fmt: skip
    if rules.evicts and not chooses:
        evict_one(slots, rules, full, slots.num_real_tokens.view(-1, 1, 1) - 1)
    return output


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    positions: Tensor,
    free_slot: Tensor,
    num_real_tokens: Tensor,
    columns: Tensor | None,
    ranks: Tensor | None,
    weights: Tensor | None,
    queries: Tensor | None,
    query_positions: Tensor | None,
    blocks: Tensor | None,
    head_of_slot: Tensor | None,
    slot_mask: Tensor | None,
    factors: Tensor | None,
    placed: Tensor | None,
    real: Tensor | None,
    recent: Tensor,
    sink: Tensor | None,
    sink_logits: Tensor | None,
    scale: float,
    softcap: float | None,
    chooses: bool,
    evicts: bool,
    adds: bool,
    most_slots: int | None,
    num_cores: int,
    in_blocks: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """Launch both kernels; mutates the eleven tensors from ``keys`` on.

    The tensors are those of `decode_step`, of `Slots` and of `QueryRing`; ``keys`` and ``values``
    may be the blocks of a pool ``[N, H, S, D]``, of which ``blocks`` names each sequence's, int64
    ``[B]``; ``in_blocks`` says that scores, positions, weights and free slots are in them too, and
    that the tokens are counted elsewhere. Without ``factors`` positions stay. ``chooses`` tells
    whether the kernel picks the next free slot.
    """
    width = 0 if factors is None else 2 * factors.shape[-2]
    batch, num_heads, _, size = query.shape
    num_kv_heads, num_slots, value_size = key.shape[1], keys.shape[2], values.shape[3]
    groups, rows = num_heads // num_kv_heads, batch * num_kv_heads
    query, key, value = (
        states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value)
    )
    exact = key.dtype == torch.float32 or width > 0
    # Shared memory of small cards, 96 KiB, holds this number of blocks.
    stages = 3 if not exact else 1 if width and key.dtype == torch.float32 else 2
    block = block_slots(size, value_size, 4 if exact else key.element_size())
    is_shared = head_of_slot is not None
    # Of the mean head, where heads share a row: the others' programs end early or are more.
    mean_slots = math.ceil(num_slots / num_kv_heads) if is_shared else num_slots
    most_slots = most_slots if is_shared and most_slots else num_slots
    num_splits, split_size = share_out(rows, mean_slots, most_slots, block, num_cores)
    logits = query.new_empty((batch, positions.shape[1], groups, num_slots), dtype=torch.float32)
    tops = query.new_empty((2, rows, groups, num_splits), dtype=torch.float32)
    mixed = query.new_empty((rows, groups, num_splits, value_size), dtype=torch.float32)
    newest = query.new_empty(rows, dtype=torch.int32)
    if output is None:
        output = value.new_empty((batch, num_heads, 1, value_size))

    def pointer(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        # The free slot stands for pointers that are not read.
        return free_slot if tensor is None else tensor.view(dtype or tensor.dtype).contiguous()

    def by_stride(tensor: Tensor | None) -> tuple[Tensor, int]:
        # One row is that of all sequences.
        return (free_slot, 0) if tensor is None else (tensor, tensor.stride(0) * (len(tensor) > 1))

    mask, ring = pointer(real, torch.uint8), free_slot if queries is None else queries
    block_index, (weights_of, weights_b) = pointer(blocks), by_stride(weights)
    (heads, heads_b), (sinks, sinks_b) = by_stride(head_of_slot), by_stride(sink)
    strides = scores.stride(0), positions.stride(0), weights_b, heads_b, free_slot.stride(0)
    same = {
        "HEADS": num_kv_heads, "GROUPS": groups, "DV": value_size, "HAS_REAL": real is not None,
        "IN_BLOCKS": in_blocks,
        "SHARED": is_shared, "CHOOSES": chooses, "WEIGHS": weights is not None,
        "BLOCK_DV": side(value_size), "MARKS": _MARKS,
        "STRIDE": triton.next_power_of_2(math.ceil(num_slots / _MARKS)),
    }  # fmt: skip
    _attend[(rows, num_splits)](
        query, key, value, keys, values, block_index, scores, positions, weights_of,
        heads, free_slot, num_real_tokens, mask, pointer(factors), pointer(ranks), ring,
        pointer(query_positions), pointer(placed), logits, tops[0], tops[1], mixed, newest,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), keys.stride(0), values.stride(0), ring.stride(0),
        0 if placed is None or len(placed) == 1 else 1, *strides,
        num_slots, split_size, 1 if queries is None else queries.shape[2],
        scale, 1.0 if softcap is None else softcap,
        D=size, R=width, HAS_BLOCKS=blocks is not None, HAS_SOFTCAP=softcap is not None,
        KEEPS_LOGITS=adds, MEANS=0 if queries is None else queries.shape[1] // num_kv_heads,
        HAS_PLACES=query_positions is not None, HAS_PLACED=placed is not None,
        PRECISION="tf32x3" if exact else "tf32",
        BLOCK_G=side(groups), BLOCK_D=side(size - width), BLOCK_R=side(width // 2),
        BLOCK_S=block, num_stages=stages, **same,
    )  # fmt: skip
    block_groups, block_splits = map(triton.next_power_of_2, (groups, num_splits))
    _finish[(rows,)](
        output, scores, positions, weights_of, heads, block_index, free_slot, num_real_tokens,
        pointer(columns), mask, pointer(slot_mask, torch.uint8), pointer(ranks), sinks,
        recent, logits, tops[0], tops[1], mixed, newest, pointer(sink_logits),
        *strides, sinks_b, by_stride(recent)[1], num_slots, num_splits,
        HAS_SINK_LOGITS=sink_logits is not None, HAS_SINKS=sink is not None,
        HAS_MASK=slot_mask is not None, HAS_COLUMNS=columns is not None, ROLLS=width > 0, ADDS=adds,
        APPENDS=not evicts,
        BLOCK_G=block_groups, BLOCK_P=block_splits,
        BLOCK_C=max(1, min(block_splits, _FINISH_NUMBERS // (block_groups * side(value_size)))),
        BLOCK_S=_FINISH_SLOTS, num_warps=8, **same,
    )  # fmt: skip
    return output


@torch.library.custom_op(
    "h2okv::decode_step",
    mutates_args=(
        "keys", "values", "scores", "positions", "free_slot", "num_real_tokens", "columns",
        "ranks", "weights", "queries", "query_positions",
    ),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor(c!) scores, Tensor(d!) positions, Tensor(e!) free_slot, Tensor(f!) num_real_tokens,"
    " Tensor(k!)? columns, Tensor(g!)? ranks, Tensor(h!)? weights, Tensor(i!)? queries,"
    " Tensor(j!)? query_positions,"
    " Tensor? blocks, Tensor? head_of_slot, Tensor? slot_mask, Tensor? factors, Tensor? placed,"
    " Tensor? real, Tensor recent, Tensor? sink, Tensor? sink_logits, float scale, float? softcap,"
    " bool chooses, bool evicts, bool adds, int? most_slots, int num_cores) -> Tensor",
)  # fmt: skip
def _compiled_step(query: Tensor, *args: Any) -> Tensor:
    if not query.is_cuda:
        return launch(query, *args)
    with torch.cuda.device(query.device):
        return launch(query, *args)


@_compiled_step.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    return value.new_empty((*query.shape[:3], value.shape[3]))


def block_slots(size: int, value_size: int, itemsize: int) -> int:
    """Return how many slots a program reads at a time."""
    fitting = _BLOCK_BYTES // ((side(size) + side(value_size)) * itemsize)
    return max(16, min(64, 1 << (fitting.bit_length() - 1)))


def share_out(
    rows: int, mean_slots: int, most_slots: int, block: int, num_cores: int
) -> tuple[int, int]:
    """Say into how many parts the slots of each KV head are cut, and of how many slots each is."""
    desired = math.ceil(_PROGRAMS_PER_CORE * num_cores / rows)
    num_splits = max(1, min(desired, math.ceil(mean_slots / block)))
    split_size = block * math.ceil(mean_slots / num_splits / block)
    return math.ceil(most_slots / split_size), split_size


def side(size: int) -> int:
    """Side of a block that a matrix product takes."""
    return max(16, triton.next_power_of_2(size))
