"""Triton kernels of the decode step."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2okv.ops.decode import Slots, StepRules, end_step, rank_new
from h2okv.ops.indexed import Indexed

# What a program of the first kernel reads at a time, in the dtype that it computes with.
_BLOCK_BYTES = 32 << 10
# Slots that a program of the second kernel reads at a time: single numbers, not entries.
_FINISH_SLOTS = 256
_PROGRAMS_PER_CORE = 4  # fewer leave the memory idle between two loads
# Replaces -inf as the maximum of a row that sees nothing: inf - inf would be NaN.
_NOTHING = tl.constexpr(-1e30)


@triton.jit
def number(value):
    """Return a number as fp32: compiled models pass Python's numbers as fp64."""
    return tl.full([], value, tl.float32)


@triton.jit
def _attend(
    query, new_key, new_value, keys, values, blocks, positions, free, seen, real, factors, ranks,
    logits, tops, totals, mixed,
    query_b, query_h, key_b, key_h, value_b, value_h, keys_b, values_b,
    num_slots, split_size, scale, softcap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, HAS_REAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    row = row.to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    slot = tl.load(free + row)
    position = tl.load(seen + batch).to(tl.int32)
    if HAS_REAL:
        position = tl.where(tl.load(real + batch) != 0, position, -1)
    first = split * split_size
    last = tl.minimum(first + split_size, num_slots)
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
    block = batch
    if HAS_BLOCKS:
        block = tl.load(blocks + batch)
    keys += block * keys_b + head * num_slots * D
    values += block * values_b + head * num_slots * DV
    tl.store(values + slot * DV + output, added_value, mask=(output < DV) & owns)
    if R < D:
        plain_query = tl.load(
            query_row + plain[None, :], mask=some_queries & (plain < D)[None, :], other=0.0
        )
        plain_added = tl.load(key_row + plain, mask=plain < D, other=0.0)
        tl.store(keys + slot * D + plain, plain_added, mask=(plain < D) & owns)
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
    top = tl.full([BLOCK_G], _NOTHING, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mix = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for start in range(first, last, BLOCK_S):
        slots = start + tl.arange(0, BLOCK_S)
        inside = slots < last
        is_new = slots == slot
        slot_positions = tl.load(positions + row * num_slots + slots, mask=inside, other=-1)
        slot_positions = tl.where(is_new, position, slot_positions)
        is_entry = inside & (slot_positions >= 0)
        # The new entry comes from its argument: its slot may not have been written yet.
        cached = (is_entry & (slots != slot))[:, None]
        entries = slots[:, None]
        scores = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
        if R < D:
            key = tl.load(
                keys + entries * D + plain[None, :],
                mask=cached & (plain < D)[None, :],
                other=0.0,
            )
            key = tl.where(is_new[:, None], plain_added[None, :], key)
            scores += tl.dot(
                plain_query, tl.trans(key.to(plain_query.dtype)), input_precision=PRECISION
            )
        if R > 0:
            rank = tl.load(ranks + row * num_slots + slots, mask=is_entry, other=0)[:, None]
            seen_pairs = cached & is_pair[None, :]
            even = tl.load(keys + entries * D + 2 * pair[None, :], mask=seen_pairs, other=0.0)
            odd = tl.load(keys + entries * D + 2 * pair[None, :] + 1, mask=seen_pairs, other=0.0)
            even = tl.where(is_new[:, None], even_added[None, :], even).to(tl.float32)
            odd = tl.where(is_new[:, None], odd_added[None, :], odd).to(tl.float32)
            rotated = is_entry[:, None] & is_pair[None, :]
            real_part = tl.load(factors + rank * R + 2 * pair[None, :], mask=rotated, other=0.0)
            imaginary = tl.load(factors + rank * R + 2 * pair[None, :] + 1, mask=rotated, other=0.0)
            scores += tl.dot(
                even_query, tl.trans(even * real_part - odd * imaginary), input_precision=PRECISION
            )
            scores += tl.dot(
                odd_query, tl.trans(even * imaginary + odd * real_part), input_precision=PRECISION
            )
        scores = scores * number(scale)
        if HAS_SOFTCAP:
            cap = number(softcap)
            scores = (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0) * cap
        scores = tl.where(is_entry[None, :], scores, -float("inf"))
        tl.store(
            logits + (row * GROUPS + group)[:, None] * num_slots + slots[None, :],
            scores, mask=some_queries & inside[None, :],
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(weights, axis=1)
        value = tl.load(
            values + entries * DV + output[None, :],
            mask=cached & (output < DV)[None, :],
            other=0.0,
        )
        value = tl.where(is_new[:, None], added_value[None, :], value)
        # What is no entry has weight zero, but zero times NaN would still be NaN.
        value = tl.where(is_entry[:, None], value, 0.0).to(added_value.dtype)
        mix = mix * fade[:, None]
        mix += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        top = higher
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
    output, scores, positions, free, seen, real, slot_mask, ranks, sinks, recents,
    logits, tops, totals, mixed, sink_logits, num_slots, num_splits,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DV: tl.constexpr, HAS_REAL: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_MASK: tl.constexpr,
    ROLLS: tl.constexpr, CHOOSES: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch = row // HEADS
    slot = tl.load(free + row)
    position = tl.load(seen + batch).to(tl.int32)
    newest = position
    if HAS_REAL:
        is_real = tl.load(real + batch) != 0
        newest = tl.where(is_real, position, position - 1)
        position = tl.where(is_real, position, -1)
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
    for index in range(0, num_splits):
        source = (row * GROUPS + group) * num_splits + index
        fade = tl.exp(tl.load(tops + source, mask=some_queries, other=_NOTHING) - top)
        mix += fade[:, None] * tl.load(
            mixed + source[:, None] * DV + wide[None, :], mask=has_number, other=0.0
        )
    tl.store(
        output + (row * GROUPS + group)[:, None] * DV + wide[None, :],
        (mix * factor[:, None]).to(output.dtype.element_ty), mask=has_number,
    )  # fmt: skip
    if CHOOSES:
        recent = tl.load(recents + batch).to(tl.int32)
        sink = 0
        if HAS_SINKS:
            sink = tl.load(sinks + batch).to(tl.int32)
    best_rank = tl.full([], float("inf"), tl.float32)
    best_position, best = tl.full([], 2147483647, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, num_slots, BLOCK_S):
        slots = start + tl.arange(0, BLOCK_S)
        inside = slots < num_slots
        seen_by = some_queries[:, None] & inside[None, :]
        some_logits = tl.load(
            logits + (row * GROUPS + group)[:, None] * num_slots + slots[None, :],
            mask=seen_by, other=-float("inf"),
        )  # fmt: skip
        added = tl.sum(tl.exp(some_logits - top[:, None]) * factor[:, None], axis=0)
        if HAS_REAL:
            added = tl.where(is_real, added, 0.0)
        where = row * num_slots + slots
        score = tl.load(scores + where, mask=inside, other=0.0)
        score = tl.where(slots == slot, 0.0, score) + added
        tl.store(scores + where, score, mask=inside)
        if CHOOSES:
            slot_positions = tl.load(positions + where, mask=inside, other=-1)
            slot_positions = tl.where(slots == slot, position, slot_positions)
            stays = slot_positions > newest - recent
            if HAS_SINKS:
                stays = stays | (slot_positions < sink)
            rank = tl.where(stays, float("inf"), score)
            rank = tl.where(slot_positions < 0, -float("inf"), rank)
            if HAS_MASK:
                is_within = tl.load(slot_mask + where, mask=inside, other=0) != 0
                rank = tl.where(is_within, rank, float("inf"))
            # Slots beyond the last one never win.
            rank = tl.where(inside, rank, float("inf"))
            slot_positions = tl.where(inside, slot_positions, 2147483647)
            lowest = tl.min(rank, axis=0)
            oldest = tl.min(tl.where(rank == lowest, slot_positions, 2147483647), axis=0)
            leftmost = tl.min(
                tl.where((rank == lowest) & (slot_positions == oldest), slots, 2147483647), axis=0
            )
            is_older = (lowest == best_rank) & (oldest < best_position)
            is_better = is_older | (lowest < best_rank)
            best = tl.where(is_better, leftmost, best)
            best_position = tl.where(is_better, oldest, best_position)
            best_rank = tl.where(is_better, lowest, best_rank)
    base = row * num_slots
    if CHOOSES:
        # Both stores say the same where the new entry itself is evicted.
        tl.store(positions + base + slot, tl.where(slot == best, -1, position))
        tl.store(positions + base + best, -1)
        tl.store(free + row, best.to(tl.int64))
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
    else:
        tl.store(positions + base + slot, position)


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
    query, rolled = rank_new(query, slots, rules, full, real)
    factors, ranks = (None, None) if rolled is None else rolled
    source: Any = slots
    keys, values, blocks = source.keys, source.values, None
    if isinstance(keys, Indexed):
        blocks, keys, values = keys.block_index, keys.blocks, values.blocks
    chooses = rules.priority is None and rules.evicts
    # A compiled model calls what was compared with PyTorch here, and looks no further into it.
    run = torch.ops.h2okv.decode_step if torch.compiler.is_compiling() else launch
    output: Tensor = run(
        query, key, value, keys, values, slots.scores, slots.positions, slots.free_slot, ranks,
        blocks, slots.num_real_tokens, slots.slot_mask, factors, real, rules.recent, rules.sink,
        rules.spec.sinks, rules.spec.scale, rules.spec.softcap, chooses, rules.adds, num_cores,
    )  # fmt: skip
    if chooses:
        slots.num_real_tokens.add_(1 if real is None else real[:, 0])
    else:
        end_step(slots, rules, full, real)
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
    ranks: Tensor | None,
    blocks: Tensor | None,
    num_real_tokens: Tensor,
    slot_mask: Tensor | None,
    factors: Tensor | None,
    real: Tensor | None,
    recent: Tensor,
    sink: Tensor | None,
    sink_logits: Tensor | None,
    scale: float,
    softcap: float | None,
    chooses: bool,
    adds: bool,
    num_cores: int,
) -> Tensor:
    """Launch both kernels; mutates the six tensors from ``keys`` on.

    The tensors are those of `decode_step` and of `Slots`; ``keys`` and ``values`` may be the blocks
    of a pool ``[N, H, S, D]``, of which ``blocks`` names each sequence's, int64 ``[B]``. Without
    ``factors`` positions stay. ``chooses`` tells whether the kernel picks the next free slot.
    """
    width = 0 if factors is None else 2 * factors.shape[-2]
    batch, num_heads, _, size = query.shape
    num_kv_heads, num_slots, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    groups, rows = num_heads // num_kv_heads, batch * num_kv_heads
    query, key, value = (states.contiguous() for states in (query, key, value))
    exact = key.dtype == torch.float32 or width > 0
    # Shared memory of small cards, 96 KiB, holds this number of blocks.
    stages = 3 if not exact else 1 if width and key.dtype == torch.float32 else 2
    block = block_slots(size, value_size, 4 if exact else key.element_size())
    num_splits = share_out(rows, num_slots, block, num_cores)
    logits = query.new_empty((rows, groups, num_slots), dtype=torch.float32)
    tops = query.new_empty((2, rows, groups, num_splits), dtype=torch.float32)
    mixed = query.new_empty((rows, groups, num_splits, value_size), dtype=torch.float32)
    output = value.new_empty((batch, num_heads, 1, value_size))

    def pointer(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        # The free slot stands for pointers that are not read.
        return free_slot if tensor is None else tensor.to(dtype or tensor.dtype).contiguous()

    mask = pointer(real, torch.uint8)
    _attend[(rows, num_splits)](
        query, key, value, keys, values, pointer(blocks), positions, free_slot,
        num_real_tokens, mask, pointer(factors), pointer(ranks), logits, tops[0], tops[1], mixed,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), keys.stride(0), values.stride(0),
        num_slots, _split_size(num_slots, num_splits, block),
        scale, 1.0 if softcap is None else softcap,
        HEADS=num_kv_heads, GROUPS=groups, D=size, DV=value_size, R=width,
        HAS_BLOCKS=blocks is not None, HAS_REAL=real is not None, HAS_SOFTCAP=softcap is not None,
        PRECISION="tf32x3" if exact else "tf32",
        BLOCK_G=side(groups), BLOCK_D=side(size - width), BLOCK_R=side(width // 2),
        BLOCK_DV=side(value_size), BLOCK_S=block, num_stages=stages,
    )  # fmt: skip
    _finish[(rows,)](
        output, scores if adds else torch.empty_like(scores), positions, free_slot,
        num_real_tokens, mask, pointer(slot_mask, torch.uint8), pointer(ranks), pointer(sink),
        recent, logits, tops[0], tops[1], mixed, pointer(sink_logits), num_slots, num_splits,
        HEADS=num_kv_heads, GROUPS=groups, DV=value_size, HAS_REAL=real is not None,
        HAS_SINK_LOGITS=sink_logits is not None, HAS_SINKS=sink is not None,
        HAS_MASK=slot_mask is not None, ROLLS=width > 0, CHOOSES=chooses,
        BLOCK_G=triton.next_power_of_2(groups), BLOCK_P=triton.next_power_of_2(num_splits),
        BLOCK_DV=side(value_size), BLOCK_S=_FINISH_SLOTS,
    )  # fmt: skip
    return output


@torch.library.custom_op(
    "h2okv::decode_step",
    mutates_args=("keys", "values", "scores", "positions", "free_slot", "ranks"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor(c!) scores, Tensor(d!) positions, Tensor(e!) free_slot, Tensor(f!)? ranks,"
    " Tensor? blocks, Tensor num_real_tokens, Tensor? slot_mask, Tensor? factors, Tensor? real,"
    " Tensor recent, Tensor? sink, Tensor? sink_logits, float scale, float? softcap,"
    " bool chooses, bool adds, int num_cores) -> Tensor",
)
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


def share_out(rows: int, num_slots: int, block: int, num_cores: int) -> int:
    """Says into how many parts the slots of each KV head are cut."""
    desired = math.ceil(_PROGRAMS_PER_CORE * num_cores / rows)
    num_splits = max(1, min(desired, math.ceil(num_slots / block)))
    return math.ceil(num_slots / _split_size(num_slots, num_splits, block))


def _split_size(num_slots: int, num_splits: int, block: int) -> int:
    return block * math.ceil(math.ceil(num_slots / num_splits) / block)


def side(size: int) -> int:
    """Side of a block that a matrix product takes."""
    return max(16, triton.next_power_of_2(size))
