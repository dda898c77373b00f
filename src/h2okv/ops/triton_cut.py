"""A cut as two Triton kernels: who stays, and the move into the first slots of each head.

Twins: `h2okv.ops.choice` and `h2okv.ops.compaction`. The first kernel finds the priority of the
K-th entry of a row digit by digit, and the position where equal ones are divided, so that nothing
is sorted; the second copies whole entries with all that belongs to them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2okv.ops.choice import WRITTEN_SHARE, CutRules
from h2okv.ops.compaction import NO_HEAD

# Bits of the float32 infinity, which are those of every protected entry.
_INF_BITS = tl.constexpr(0x7F800000)
_LOWEST_INT = tl.constexpr(-(1 << 31))
# What weighs least, and is no zero (`h2okv.ops.reference.value_norms`).
_TINY = tl.constexpr(2.0**-126)
_EVICTED, _MOVED = tl.constexpr(-1), tl.constexpr(-2)
# Entries that a program of the first kernel compares at a time with 16 candidates; slots that one
# of the second copies.
_BLOCK_ENTRIES, _BLOCK_SLOTS = 1024, 32


@triton.jit
def _keys(
    priority, weights, positions, row, position_row, start, num_entries, sink, first_recent,
    HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return entries' numbers, positions and keys: int32, the lowest goes first."""
    entries = start + tl.arange(0, BLOCK)
    inside = entries < num_entries
    position = tl.load(positions + position_row + entries, mask=inside, other=-1)
    rank = tl.load(priority + row * num_entries + entries, mask=inside, other=0.0)
    if HAS_WEIGHTS:
        rank = rank * tl.load(weights + row * num_entries + entries, mask=inside, other=0.0)
    bits = rank.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The order of numbers as one of integers: zeros are equal, NaN comes last, as in a sort.
    key = tl.where(bits < 0, -size, size)
    key = tl.where(size > _INF_BITS, 0x7FFFFFFF, key)
    key = tl.where((position > first_recent) | (position < sink), _INF_BITS, key)
    return entries, position, tl.where(position < 0, _LOWEST_INT, key)


@triton.jit
def _select(
    priority, weights, scores, positions, seen, sinks, recents, totals, written, order, moves,
    counts, num_entries, order_size, position_b, position_h, sink_b, recent_b, recent_h, total_b,
    total_h,
    HEADS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_WRITTEN: tl.constexpr,
    SHARE: tl.constexpr, PARTS: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the entries of one head, and list where each of its slots gets its entry from."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    position_row = batch * position_b + head * position_h
    total = tl.load(totals + batch * total_b + head * total_h)
    sink = tl.load(sinks + batch * sink_b)
    recent = tl.load(recents + batch * recent_b + head * recent_h)
    if HAS_WRITTEN:
        num_pins = tl.zeros([], tl.int32)
        for start in range(0, num_entries, BLOCK):
            entries = start + tl.arange(0, BLOCK)
            score = tl.load(scores + row * num_entries + entries, entries < num_entries, other=0.0)
            num_pins += tl.sum((tl.abs(score) == float("inf")).to(tl.int32), axis=0)
        room = total - sink
        share = tl.minimum(room * SHARE // PARTS, room - num_pins)
        recent = tl.maximum(recent, tl.minimum(share, tl.load(written + batch)))
    newest = tl.load(seen + batch) - 1
    first_recent = tl.maximum(newest - recent, -1).to(tl.int32)
    sink = tl.minimum(sink, 0x7FFFFFFF).to(tl.int32)
    count = tl.zeros([], tl.int32)
    for start in range(0, num_entries, BLOCK):
        entries, position, key = _keys(
            priority, weights, positions, row, position_row, start, num_entries, sink,
            first_recent, HAS_WEIGHTS, BLOCK,
        )  # fmt: skip
        count += tl.sum((position >= 0).to(tl.int32), axis=0)
    num_kept = tl.minimum(total, count).to(tl.int32)
    # The largest key that `num_kept` entries reach, and of its entries the lowest position to stay.
    lowest_key, lowest_position = tl.full([], _LOWEST_INT, tl.int32), tl.zeros([], tl.int32)
    digits = tl.arange(0, 16)
    if num_kept < count:
        shift = tl.full([], 28, tl.int32)
        while shift >= 0:
            candidates = lowest_key + (digits << shift)
            reached = tl.zeros([16], tl.int32)
            for start in range(0, num_entries, BLOCK):
                entries, position, key = _keys(
                    priority, weights, positions, row, position_row, start, num_entries, sink,
                    first_recent, HAS_WEIGHTS, BLOCK,
                )  # fmt: skip
                at_least = (key[:, None] >= candidates[None, :]) & (position >= 0)[:, None]
                reached += tl.sum(at_least.to(tl.int32), axis=0)
            digit = tl.max(tl.where(reached >= num_kept, digits, 0), axis=0)
            lowest_key += digit << shift
            shift -= 4
        above, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for start in range(0, num_entries, BLOCK):
            entries, position, key = _keys(
                priority, weights, positions, row, position_row, start, num_entries, sink,
                first_recent, HAS_WEIGHTS, BLOCK,
            )  # fmt: skip
            above += tl.sum(((key > lowest_key) & (position >= 0)).to(tl.int32), axis=0)
            equal += tl.sum(((key == lowest_key) & (position >= 0)).to(tl.int32), axis=0)
        if above + equal > num_kept:
            shift = tl.full([], 28, tl.int32)
            while shift >= 0:
                candidates = lowest_position + (digits << shift)
                reached = tl.zeros([16], tl.int32)
                for start in range(0, num_entries, BLOCK):
                    entries, position, key = _keys(
                        priority, weights, positions, row, position_row, start, num_entries, sink,
                        first_recent, HAS_WEIGHTS, BLOCK,
                    )  # fmt: skip
                    # Numbers beyond the largest int32 are negative here, and no position.
                    at_least = (position[:, None] >= candidates[None, :]) & (
                        (key == lowest_key)[:, None] & (candidates >= 0)[None, :]
                    )
                    reached += tl.sum(at_least.to(tl.int32), axis=0)
                digit = tl.max(tl.where(above + reached >= num_kept, digits, 0), axis=0)
                lowest_position += digit << shift
                shift -= 4
    num_moved, num_holes = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    order += row * order_size
    for start in range(0, num_entries, BLOCK):
        entries, position, key = _keys(
            priority, weights, positions, row, position_row, start, num_entries, sink,
            first_recent, HAS_WEIGHTS, BLOCK,
        )  # fmt: skip
        inside = entries < num_entries
        stays = (key > lowest_key) | ((key == lowest_key) & (position >= lowest_position))
        stays = stays & (position >= 0)
        if IN_PLACE:
            # The i-th hole below the count gets the i-th entry beyond it: no other moves.
            is_hole = inside & (entries < num_kept) & (stays == 0)
            is_far = stays & (entries >= num_kept)
            hole = num_holes + tl.cumsum(is_hole.to(tl.int32), axis=0) - 1
            source = tl.where(stays, entries, num_entries + hole)
            source = tl.where(entries < num_kept, source, tl.where(stays, _MOVED, _EVICTED))
            tl.store(order + entries, source, mask=inside)
            num_holes += tl.sum(is_hole.to(tl.int32), axis=0)
        else:
            is_far = stays
        number = num_moved + tl.cumsum(is_far.to(tl.int32), axis=0) - 1
        if IN_PLACE:
            tl.store(moves + row * num_entries + number, entries, mask=is_far)
        else:
            tl.store(order + number, entries, mask=is_far)
        num_moved += tl.sum(is_far.to(tl.int32), axis=0)
    tl.store(counts + row, num_kept)


@triton.jit
def _first_slot(totals, batch, head, span, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return a head's first slot and its number of slots in a row that heads share."""
    heads = tl.arange(0, BLOCK_H)
    rooms = tl.load(totals + batch * HEADS + heads, mask=heads < HEADS, other=0).to(tl.int32) + span
    first = tl.sum(tl.where(heads < head, rooms, 0), axis=0)
    return first, tl.sum(tl.where(heads == head, rooms, 0), axis=0)


@triton.jit
def _move(
    order, moves, counts, totals, keys, values, scores, positions, weights,
    new_keys, new_values, new_scores, new_positions, new_weights, head_of_slot, free,
    keys_b, keys_h, keys_n, values_b, values_h, values_n, scores_b, scores_h,
    positions_b, positions_h, num_entries, order_size, num_slots, span,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHOOSES: tl.constexpr,
    FROM_SHARED: tl.constexpr, TO_SHARED: tl.constexpr, IN_PLACE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, NO_OWNER: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill some slots of one head, in place or of new tensors."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    slots = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, room, first_new, room_new = 0, num_entries, 0, num_slots
    if FROM_SHARED:
        first, room = _first_slot(totals, batch, head, span, HEADS, BLOCK_H)
    if TO_SHARED:
        first_new, room_new = _first_slot(totals, batch, head, span, HEADS, BLOCK_H)
    limit = room_new
    new_row = row * num_slots
    if TO_SHARED:
        # The last head's programs look after the slots of no head too.
        limit = tl.where(head == HEADS - 1, num_slots - first_new, room_new)
        new_row = batch * num_slots + first_new
    if CHOOSES:
        count = tl.load(counts + row)
        in_order = slots < (num_entries if IN_PLACE else count)
        source = tl.load(order + row * order_size + slots, mask=in_order, other=_EVICTED)
        is_evicted = source == _EVICTED
        if IN_PLACE:
            hole = source - num_entries
            source = tl.load(moves + row * num_entries + hole, mask=hole >= 0, other=0) + tl.where(
                hole >= 0, 0, source
            )
    else:
        count, source, is_evicted = room, slots, slots >= room
    is_entry, inside = slots < count, slots < limit
    # What a slot in use gets; in place also empties the slot that an entry leaves.
    changes = inside
    if IN_PLACE:
        changes = is_entry & (source != slots)
    moved = is_entry & changes
    wide, wide_value = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    at, new_at = (first + source).to(tl.int64)[:, None], (new_row + slots)[:, None]
    key_head = 0 if FROM_SHARED else head
    entry_keys = tl.load(
        keys + batch * keys_b + key_head * keys_h + at * keys_n + wide[None, :],
        mask=moved[:, None] & (wide < D)[None, :], other=0.0,
    )  # fmt: skip
    entry_values = tl.load(
        values + batch * values_b + key_head * values_h + at * values_n + wide_value[None, :],
        mask=moved[:, None] & (wide_value < DV)[None, :], other=0.0,
    )  # fmt: skip
    tl.store(
        new_keys + new_at * D + wide[None, :], entry_keys,
        mask=changes[:, None] & (wide < D)[None, :],
    )  # fmt: skip
    tl.store(
        new_values + new_at * DV + wide_value[None, :], entry_values,
        mask=changes[:, None] & (wide_value < DV)[None, :],
    )  # fmt: skip
    # Numbers of a cut come by head, whatever the slots.
    number_at = source
    if FROM_SHARED and not CHOOSES:
        number_at = first + source
    number_head = 0 if FROM_SHARED and not CHOOSES else head
    score_at = batch * scores_b + number_head * scores_h + number_at
    position_at = batch * positions_b + number_head * positions_h + number_at
    score = tl.load(scores + score_at, mask=is_entry, other=0.0)
    position = tl.load(positions + position_at, mask=is_entry, other=-1)
    if HAS_WEIGHTS:
        weight = tl.load(weights + score_at, mask=moved, other=_TINY)
        tl.store(new_weights + new_row + slots, weight, mask=changes)
    empties = inside
    if IN_PLACE:
        # Slots that an entry has left are emptied by the program that has read them, in any thread.
        tl.debug_barrier()
        left = new_row + source
        tl.store(new_scores + left, 0.0, mask=moved)
        tl.store(new_positions + left, -1, mask=moved)
        empties = inside & (is_entry | is_evicted)
    tl.store(new_scores + new_row + slots, score, mask=empties)
    tl.store(new_positions + new_row + slots, position, mask=empties)
    if TO_SHARED and not IN_PLACE:
        owner = tl.where(slots < room_new, head.to(tl.int32), NO_OWNER)
        tl.store(head_of_slot + new_row + slots, owner.to(tl.uint8), mask=inside)
    if CHOOSES:
        next_slot = (first_new + count).to(tl.int64)
        tl.store(free + row, next_slot, mask=tl.program_id(1) == 0)


@triton.jit
def _join(
    totals, keys, values, scores, positions, block_keys, block_values, block_scores,
    block_positions, all_keys, all_values, all_scores, all_positions, is_entry,
    key_b, key_h, key_n, value_b, value_h, value_n, score_b, score_h, score_n,
    position_b, position_h, position_n, num_slots, past, length, span,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, FROM_SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the tokens of a block behind the slots of one head, in new tensors."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, room = row * num_slots, num_slots
    if FROM_SHARED:
        first, room = _first_slot(totals, batch, head, span, HEADS, BLOCK_H)
        first += batch * num_slots
    is_slot, tokens = entries < room, entries - past
    is_new, inside = tokens >= 0, tokens < length
    is_new = is_new & inside
    slots = (first + entries).to(tl.int64)
    target = row * (past + length) + entries
    wide, wide_value = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    is_number, is_value_number = wide < D, wide_value < DV
    key_at = block_keys + batch * key_b + head * key_h + tokens.to(tl.int64)[:, None] * key_n
    value_at = block_values + batch * value_b + head * value_h
    value_at += tokens.to(tl.int64)[:, None] * value_n
    # One of the two is loaded, the other is zero.
    slot_keys = tl.load(
        keys + slots[:, None] * D + wide, mask=is_slot[:, None] & is_number, other=0.0
    )
    slot_values = tl.load(
        values + slots[:, None] * DV + wide_value,
        mask=is_slot[:, None] & is_value_number, other=0.0,
    )  # fmt: skip
    new_keys = tl.load(key_at + wide, mask=is_new[:, None] & is_number, other=0.0)
    new_values = tl.load(value_at + wide_value, mask=is_new[:, None] & is_value_number, other=0.0)
    tl.store(
        all_keys + target[:, None] * D + wide, tl.where(is_new[:, None], new_keys, slot_keys),
        mask=inside[:, None] & is_number,
    )  # fmt: skip
    tl.store(
        all_values + target[:, None] * DV + wide_value,
        tl.where(is_new[:, None], new_values, slot_values),
        mask=inside[:, None] & is_value_number,
    )  # fmt: skip
    score_at = batch * score_b + head * score_h + tokens * score_n
    position_at = batch * position_b + head * position_h + tokens * position_n
    score = tl.load(scores + slots, mask=is_slot, other=0.0)
    position = tl.load(positions + slots, mask=is_slot, other=-1)
    new_score = tl.load(block_scores + score_at, mask=is_new, other=0.0)
    new_position = tl.load(block_positions + position_at, mask=is_new, other=-1)
    position = tl.where(is_new, new_position, position)
    tl.store(all_scores + target, tl.where(is_new, new_score, score), mask=inside)
    tl.store(all_positions + target, position, mask=inside)
    tl.store(is_entry + target, (position >= 0).to(tl.uint8), mask=inside)


class Chosen(NamedTuple):
    """Where the slots of each head get their entries from."""

    # int32 [B * H, K]: the entries that stay, in their order. In place [B * H, N]: the number of
    # an entry that stays where it is, or N + i, the i-th of `moves`; beyond the count _EVICTED for
    # what goes or is empty, _MOVED for what moves.
    order: Tensor
    moves: Tensor  # int32 [B * H, N], in place; else anything
    counts: Tensor  # int32 [B * H], entries that stay
    num_entries: int  # N
    in_place: bool


class Rooms(NamedTuple):
    """How heads share a row: one behind the other, each with its K and a span of slots."""

    totals: Tensor  # K, int64 [B, H, 1]
    span: int
    largest: int  # slots of the largest head; of new tensors with those behind the last head


class Rows(NamedTuple):
    """Entries of each head, or slots, which heads may share (`h2okv.ops.decode.Slots`)."""

    keys: Tensor  # [B, H or 1, N, D]
    values: Tensor  # [B, H or 1, N, Dv]
    scores: Tensor  # fp32 [B, H or 1, N]
    positions: Tensor  # int32 [B, H or 1, N]
    weights: Tensor | None = None  # fp32 [B, H or 1, N]

    @property
    def is_cuda(self) -> bool:
        return self.keys.is_cuda

    @property
    def device(self) -> torch.device:
        return self.keys.device


def select(
    priority: Tensor,
    weights: Tensor | None,
    scores: Tensor,
    positions: Tensor,
    rules: CutRules,
    limit: int,
    in_place: bool,
) -> Chosen:
    """Choose what stays, as `h2okv.ops.choice.choose` does.

    Args:
        priority: fp32 ``[B, H, N]``.
        weights: fp32 ``[B, H, N]``, factors of the priority; ``None`` for one.
        scores: fp32 ``[B, H, N]``, infinite where an entry is pinned.
        positions: int32 ``[B, H, N]``; -1 marks an empty slot.
        rules: what is protected, and how many stay.
        limit: the largest number that stays.
        in_place: whether the entries are slots, of which as few as can be shall move.
    """
    batch, heads, num_entries = positions.shape
    rows = batch * heads
    order_size = num_entries if in_place else min(limit, num_entries)
    order, moves = (
        positions.new_empty((rows, size)) for size in (order_size, num_entries * in_place)
    )
    counts = positions.new_empty((rows,))
    if positions.stride(-1) != 1:
        positions = positions.contiguous()
    recent, total = (tensor.expand(batch, heads, 1) for tensor in (rules.recent, rules.total))
    seen, written = rules.num_real_tokens, rules.written
    _select[(rows,)](
        priority.contiguous(), priority if weights is None else weights.contiguous(),
        scores.contiguous(), positions, seen, rules.sink, recent, total,
        seen if written is None else written, order, moves, counts, num_entries, order_size,
        *positions.stride()[:2], rules.sink.stride(0), *recent.stride()[:2], *total.stride()[:2],
        HEADS=heads, HAS_WEIGHTS=weights is not None, HAS_WRITTEN=written is not None,
        SHARE=WRITTEN_SHARE[0], PARTS=WRITTEN_SHARE[1], IN_PLACE=in_place, BLOCK=_BLOCK_ENTRIES,
    )  # fmt: skip
    return Chosen(order, moves, counts, num_entries, in_place)


def move(
    source: Rows,
    target: Rows,
    heads: int,
    chosen: Chosen | None = None,
    rooms: Rooms | None = None,
    free: Tensor | None = None,
    head_of_slot: Tensor | None = None,
) -> None:
    """Fill slots, in place if source and target have the same keys; mutates the target.

    Args:
        source: where entries come from. Scores, positions and weights of a choice are by head.
        target: contiguous.
        heads: number H of heads.
        chosen: what stays; ``None``: all, of shared slots to rows of each head.
        rooms: of shared slots.
        free: int64 ``[B, H, 1]`` or ``[B, 1, H]``, gets the first slot without an entry.
        head_of_slot: uint8 ``[B, 1, S]``, gets the head of new shared slots.
    """
    batch, _, num_slots = target.positions.shape
    scores, positions = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous()
        for tensor in (source.scores, source.positions)
    )
    keys, values = (
        states if states.stride(-1) == 1 else states.contiguous()
        for states in (source.keys, source.values)
    )
    num_entries = positions.shape[2] if chosen is None else chosen.num_entries
    in_place = chosen is not None and chosen.in_place
    from_shared = rooms is not None and (in_place or chosen is None)
    to_shared = rooms is not None and chosen is not None
    unused = positions
    order, moves, counts = (unused,) * 3 if chosen is None else chosen[:3]
    weights, new_weights = source.weights, target.weights
    if weights is not None:
        scores, weights = scores.contiguous(), weights.contiguous()
    size, value_size = keys.shape[-1], values.shape[-1]
    width = num_slots if rooms is None or not to_shared else rooms.largest
    _move[(batch * heads, triton.cdiv(width, _BLOCK_SLOTS))](
        order, moves, counts, unused if rooms is None else rooms.totals,
        keys, values, scores, positions, unused if weights is None else weights,
        target.keys, target.values, target.scores, target.positions,
        unused if new_weights is None else new_weights,
        unused if head_of_slot is None else head_of_slot, unused if free is None else free,
        *keys.stride()[:3], *values.stride()[:3], *scores.stride()[:2], *positions.stride()[:2],
        num_entries, order.shape[-1], num_slots, 0 if rooms is None else rooms.span,
        HEADS=heads, D=size, DV=value_size, CHOOSES=chosen is not None, FROM_SHARED=from_shared,
        TO_SHARED=to_shared, IN_PLACE=in_place, HAS_WEIGHTS=weights is not None, NO_OWNER=NO_HEAD,
        BLOCK_D=triton.next_power_of_2(size), BLOCK_DV=triton.next_power_of_2(value_size),
        BLOCK_H=triton.next_power_of_2(heads), BLOCK=_BLOCK_SLOTS,
    )  # fmt: skip


def join(slots: Rows, block: Rows, rooms: Rooms | None) -> tuple[Rows, Tensor]:
    """Put the T tokens of a block behind P slots of each head.

    Args:
        slots: contiguous; shared if there are `rooms`.
        block: ``[B, H, T, ...]``, of any strides but of whole keys and values.
        rooms: of shared slots; P is that of the largest head.

    Returns:
        The entries ``[B, H, P + T, ...]`` and, bool ``[B, H, P + T]``, which of them are some.
    """
    batch, heads, length = block.positions.shape
    past = slots.positions.shape[2] if rooms is None else rooms.largest
    keys, values = (
        states if states.stride(-1) == 1 else states.contiguous() for states in block[:2]
    )
    entries = Rows(*(
        tensor.new_empty(batch, heads, past + length, *tensor.shape[3:]) for tensor in slots[:4]
    ))  # fmt: skip
    is_entry = torch.empty_like(entries.positions, dtype=torch.uint8)
    size, value_size = keys.shape[-1], values.shape[-1]
    _join[(batch * heads, triton.cdiv(past + length, _BLOCK_SLOTS))](
        slots.positions if rooms is None else rooms.totals, *slots[:4], keys, values,
        block.scores, block.positions, *entries[:4], is_entry,
        *keys.stride()[:3], *values.stride()[:3], *block.scores.stride(), *block.positions.stride(),
        slots.positions.shape[2], past, length, 0 if rooms is None else rooms.span,
        HEADS=heads, D=size, DV=value_size, FROM_SHARED=rooms is not None,
        BLOCK_D=triton.next_power_of_2(size), BLOCK_DV=triton.next_power_of_2(value_size),
        BLOCK_H=triton.next_power_of_2(heads), BLOCK=_BLOCK_SLOTS,
    )  # fmt: skip
    return entries, is_entry.view(torch.bool)
