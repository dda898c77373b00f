"""The decode step on slots: write, attend, score, evict."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_origin, get_type_hints

import torch
from torch import Tensor

from h2okv.ops.attention import mean_queries
from h2okv.ops.choice import protected_entries
from h2okv.ops.compaction import NO_HEAD
from h2okv.ops.indexed import Indexed, mix_values
from h2okv.ops.quant import Entries, KeyTransform, Packed, pack, packed_logits, packed_output
from h2okv.ops.reference import AttentionSpec, compute_dtype, softmax, value_norms
from h2okv.ops.rope import rotate

# Numbers of keys rotated at a time on a CPU: 2.5 MiB in fp32, which its cache holds.
_ROTATE_ELEMENTS = 5 << 17
# Query heads of a KV head up to which its keys are better read for each of them than once.
_FUSED_GROUPS = 8
# Added to a position, it sorts behind every other; no sequence is that long.
BEHIND_ALL = 1 << 30


class Ranks(NamedTuple):
    """Where keys that are not rotated yet belong."""

    factors: Tensor  # fp32 [n, R / 2, 2], the rotation to each rank
    ranks: Tensor  # int32 [B, H, S], below n; any such number for hidden slots


def write_slot(
    slots: Entries | Indexed, free: Tensor, entry: Tensor, rows: Tensor | None = None
) -> None:
    """Write one entry for each sequence and head into its free slot.

    Args:
        slots: ``[B, H, S, D]``, contiguous, packed or indexed; mutated. Slots that heads share
            (`Slots.head_of_slot`) are ``[B, 1, S, D]``.
        free: int64 ``[B, H, 1]``, the slot to take; of shared slots ``[B, 1, H]``.
        entry: ``[B, H, 1, D]``.
        rows: `_flat_slots` of them, if it is at hand.
    """
    if isinstance(slots, Indexed):
        slots.write(free, entry)
        return
    if isinstance(slots, Packed):
        _write_packed(slots, free, pack(entry, slots.bits))
        return
    size = slots.shape[-1]
    # scatter_ would copy all slots of a bf16 tensor on a CPU (torch 2.13).
    rows = _flat_slots(slots, free) if rows is None else rows
    slots.view(-1, size).index_copy_(0, rows, entry.reshape(-1, size))


def _flat_slots(slots: Tensor, free: Tensor) -> Tensor:
    """Return where free slots are if all rows stand one behind the other, int64 ``[B * H]``."""
    batch, heads, num_slots = slots.shape[:3]
    first = _constant(slots.device, torch.arange, 0, batch * heads * num_slots, num_slots)
    return (first.view(batch, heads, 1) + free).flatten()


def _write_packed(slots: Packed, free: Tensor, entry: Packed) -> None:
    write_slot(slots.codes, free, entry.codes)
    write_slot(slots.grid, free, entry.grid)


def _write_both(slots: Slots, key: Tensor, value: Tensor) -> None:
    """Write the new entry of each sequence and head."""
    keys, values = slots.keys, slots.values
    if slots.key_transform is not None:
        key, value = slots.key_transform.apply(key), value.float()
    if (
        isinstance(keys, Packed)
        and isinstance(values, Packed)
        and (keys.bits, key.shape) == (values.bits, value.shape)
    ):
        # Many small operations pack it: once for both.
        packed = pack(torch.stack([key, value]), keys.bits)
        for half, store in enumerate((keys, values)):
            entry = packed._replace(codes=packed.codes[half], grid=packed.grid[half])
            _write_packed(store, slots.free_slot, entry)
        return
    rows = None
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        rows = _flat_slots(keys, slots.free_slot)
    write_slot(keys, slots.free_slot, key, rows)
    if slots.has_values:
        write_slot(values, slots.free_slot, value, rows)


def _numbers_of_heads(count: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=device).unsqueeze(-1)


def _constant(
    device: torch.device, make: Callable[..., Tensor], *arguments: Any, **options: Any
) -> Tensor:
    """Return ``make(*arguments)`` on a device, made once for a CPU; nothing may write to it."""
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return _kept_constant(make, *arguments, **options)
    return make(*arguments, device=device, **options)


@functools.lru_cache(maxsize=256)
def _kept_constant(make: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    with torch.inference_mode(False):  # an ordinary tensor
        return make(*arguments, **options)


def decode_with_scores(
    query: Tensor,
    keys: Entries | Indexed,
    values: Entries | Indexed,
    hidden: Tensor | None,
    spec: AttentionSpec,
    ranks: Ranks | None = None,
    scores: Tensor | None = None,
    key_transform: KeyTransform | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends with one query over all slots.

    Args:
        query: ``[B, HQ, 1, D]``.
        keys: ``[B, H, S, D]``, contiguous, packed or indexed. A hidden slot may hold anything.
        values: ``[B, H, S, Dv]``, likewise. A hidden slot may hold anything finite: its
            probability is zero, and zero times NaN would still be NaN.
        hidden: bool ``[B, H, S]``, slots to leave out; ``None`` if all are entries. A sequence
            with nothing to see gives zeros. Of slots that heads share (``keys`` are ``[B, 1, S,
            D]``) it says so for each head.
        spec: how, but for window and reach.
        ranks: rotations that the keys, but not the query, still need; ``None`` if none.
        scores: fp32 ``[B, H, S]``, contiguous; the sums are added to them. Mutated.
        key_transform: how the packed keys were transformed; ``None``: not at all.

    Returns:
        ``(output, sums)``: output ``[B, HQ, 1, Dv]`` in the query's dtype, sums fp32 ``[B, H, S]``,
        or the scores if they were given.
    """
    batch, num_heads, _, size = query.shape
    num_kv_heads, num_slots = keys.shape[1], keys.shape[2]
    rows = batch * num_kv_heads
    groups = num_heads // num_kv_heads
    scale, softcap, sinks, *_ = spec
    dtype, constant, row_transform = query.dtype, None, None
    if key_transform is not None and ranks is not None:  # rotations apply to the keys themselves
        row_transform = KeyTransform(*(tensor.flatten(0, 1) for tensor in key_transform))
    elif key_transform is not None:
        if softcap is not None or sinks is not None:
            constant = key_transform.center_logits(query).reshape(rows, groups, 1) * scale
        query = key_transform.of_queries(query)
    # Logits are fp32 or wider: bf16 logits would move the scores by percents.
    logits = _logits(query.reshape(rows, groups, size), scale, _by_row(keys), ranks, row_transform)
    if constant is not None:
        logits = logits + constant
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if hidden is not None:
        unseen = hidden.view(rows, -1, 1, num_slots)
        by_head = logits.view(rows, unseen.shape[1], -1, num_slots)
        by_head.masked_fill_(unseen, torch.finfo(torch.float32).min)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, groups, 1).repeat(batch, 1, 1)
    weights = softmax(logits, sinks)
    # Of shared slots every head has one at least, and the others' come out as zero.
    if hidden is not None and hidden.shape[1] == num_kv_heads:
        # The finite floor keeps a sequence without entries free of NaN; zero it here.
        weights = weights.view_as(by_head).masked_fill(unseen, 0.0).view_as(logits)
    output = _output(weights, _by_row(values), dtype)
    output = output.view(batch, num_heads, 1, -1)
    weights = weights.float()
    if scores is not None and groups > 1 and not torch.compiler.is_compiling():
        # One product in place of a sum and an addition.
        row_of_ones = _constant(weights.device, torch.ones, rows, 1, groups, dtype=weights.dtype)
        scores.view(rows, 1, num_slots).baddbmm_(row_of_ones, weights)
        return output, scores
    # A sum over one query head would be a copy.
    sums = weights if groups == 1 else weights.sum(dim=1)
    sums = sums.view(batch, num_kv_heads, num_slots)
    return output, sums if scores is None else scores.add_(sums)


def _by_row(entries: Entries | Indexed) -> Entries | Indexed:
    """Entries ``[B, H, S, D]`` as ``[B * H, S, D]``; indexed ones as they are."""
    if isinstance(entries, Indexed):
        return entries
    if isinstance(entries, Packed):
        return entries._replace(codes=entries.codes.flatten(0, 1), grid=entries.grid.flatten(0, 1))
    return entries.view(-1, *entries.shape[2:])


def _fuses(groups: int, device: torch.device) -> bool:
    """Tell whether inductor fuses the product with conversion and sum into one loop."""
    return torch.compiler.is_compiling() and device.type == "cpu" and groups <= _FUSED_GROUPS


def _logits(
    query: Tensor,
    scale: float,
    keys: Entries | Indexed,
    ranks: Ranks | None,
    key_transform: KeyTransform | None,
) -> Tensor:
    """Logits ``[rows, G, S]`` of queries ``[rows, G, D]`` and keys ``[rows, S, D]``, fp32 or fp64.

    With ranks, transformed keys are restored first; the tensors are ``[rows, 1, D]``.
    """
    query = query.to(compute_dtype(query.dtype))
    is_fused = _fuses(query.shape[1], query.device)
    if ranks is None and isinstance(keys, Tensor) and not is_fused:
        # One operation for the product and the factor; what is added to does not count.
        columns = keys.to(query.dtype).transpose(1, 2)
        nothing = _constant(query.device, torch.ones, 1, 1, 1, dtype=query.dtype)
        return torch.baddbmm(nothing, query, columns, beta=0, alpha=scale)
    scaled = query * scale
    if isinstance(keys, Indexed):
        assert ranks is None, "indexed keys come rotated"
        return keys.logits(scaled)
    if isinstance(keys, Packed):
        if ranks is None:
            return packed_logits(scaled, keys)
        return packed_logits(scaled, keys, ranks.factors, ranks.ranks.flatten(0, 1), key_transform)
    if ranks is not None and not torch.compiler.is_compiling():
        return _logits_at_ranks(scaled, keys, ranks)
    rotated = keys.to(query.dtype)
    if ranks is not None:
        rotated = rotate(keys, ranks.factors[ranks.ranks.reshape(keys.shape[:2])])
    if is_fused:
        return (scaled.unsqueeze(2) * rotated.unsqueeze(1)).sum(dim=-1)
    return torch.bmm(scaled, rotated.transpose(1, 2))


def _output(weights: Tensor, values: Entries | Indexed, dtype: torch.dtype) -> Tensor:
    """Sum ``[rows, G, Dv]`` of values ``[rows, S, Dv]``."""
    if isinstance(values, Indexed):
        return values.mix(weights)
    if isinstance(values, Packed):
        return packed_output(weights, values).to(dtype)
    if _fuses(weights.shape[1], weights.device):
        output = (weights.unsqueeze(-1) * values.to(weights.dtype).unsqueeze(1)).sum(dim=2)
        return output.to(values.dtype)
    return mix_values(weights, values)


def _logits_at_ranks(query: Tensor, keys: Tensor, ranks: Ranks) -> Tensor:
    """Logits ``[rows, G, S]`` of keys ``[rows, S, D]`` at their ranks, piece by piece; eager."""
    (count, num_slots, size), factors = keys.shape, ranks.factors.to(query.dtype)
    width, step = 2 * factors.shape[-2], count
    if keys.device.type == "cpu":
        step = max(1, min(count, _ROTATE_ELEMENTS // (num_slots * size)))
    logits = query.new_empty(count, query.shape[1], num_slots)
    index = ranks.ranks.reshape(count, num_slots)
    gathered = factors.new_empty(step * num_slots, *factors.shape[1:])
    converted = None if keys.dtype == factors.dtype else torch.empty_like(gathered)
    for start in range(0, count, step):
        at = slice(start, start + step)
        piece, piece_ranks = keys[at], index[at].flatten()
        torch.index_select(factors, 0, piece_ranks, out=gathered[: len(piece_ranks)])
        pairs = piece[..., :width].unflatten(-1, (-1, 2))
        rotated = gathered[: len(piece_ranks)].view(pairs.shape)
        if converted is not None:
            pairs = converted[: len(piece_ranks)].view(pairs.shape).copy_(pairs)
        # A product in place takes two thirds of the time of one into new memory.
        torch.view_as_complex(rotated).mul_(torch.view_as_complex(pairs))
        rotated_keys, unrotated = rotated.flatten(-2), piece[..., width:]
        if unrotated.shape[-1] > 0:
            rotated_keys = torch.cat([rotated_keys, unrotated.to(query.dtype)], dim=-1)
        torch.bmm(query[at], rotated_keys.transpose(1, 2), out=logits[at])
    return logits


class Kind(NamedTuple):
    """What a tensor of `Slots` is: its annotation, by which go all who carry tensors."""

    dtype: torch.dtype | None = None  # None: the model's, or that of packed entries
    # What has one: an entry, one that is "derived" at cuts, a slot, its mask, all [B, H, S, ...]; a
    # head [B, H, 1, D]; a sequence [B, 1, 1]; a span of tokens.
    per: Literal["entry", "derived", "slot", "mask", "head", "sequence", "span"] = "entry"
    empty: int | None = 0  # in an empty slot; None: the number of the last slot
    changes: bool = False  # in a step; metadata does anyway
    iff: str = ""  # the option of layers that must have one, while others must not
    only: str = ""  # the option of layers that may have one
    file_name: str = ""  # if it is another in files

    @property
    def has_slots(self) -> bool:
        return self.per in ("entry", "derived", "slot", "mask")

    @property
    def is_metadata(self) -> bool:
        """Whether entries have one besides their keys and values."""
        return self.per in ("entry", "derived") and self.dtype is not None

    def is_of(self, layer: Any) -> bool:
        """Tell whether a layer's options let it have one; of ``None`` whether all layers have."""
        option = self.iff or self.only
        return not option or (layer is not None and bool(operator.attrgetter(option)(layer)))

    def empty_value(self, num_slots: int) -> int:
        return num_slots - 1 if self.empty is None else self.empty

    def resized(self, tensor: Tensor, num_slots: int) -> Tensor:
        """Pad a tensor with empty slots, or cut it, to S slots."""
        if not self.has_slots or tensor.shape[2] == num_slots:
            return tensor
        room = (0, 0) * (tensor.dim() - 3) + (0, num_slots - tensor.shape[2])
        return torch.nn.functional.pad(tensor, room, value=self.empty_value(num_slots))


@dataclass
class Slots:
    """What a decode step reads and writes; it mutates every tensor but `slot_mask`.

    Defined here because a step takes a layer's state as it is, and operations know no cache:
    `h2okv.cache.slot_state.SlotState` adds what only the layer needs.

    Where there are ranks, keys are un-rotated, pairs next to each other.

    Heads with different numbers of entries share one row of slots: then there is a `head_of_slot`,
    the dimension H of per-slot tensors is 1, and the free slots are ``[B, 1, H]``.
    """

    has_values: ClassVar[bool] = True  # or values are a part of the keys, which one write fills
    kinds: ClassVar[dict[str, Kind]]
    entries: ClassVar[list[str]]  # of them keys and values
    moving: ClassVar[list[str]]  # and what moves with these at cuts

    keys: Annotated[Entries, Kind()]  # [B, H, S, D], contiguous or packed
    values: Annotated[Entries, Kind()]  # [B, H, S, Dv], contiguous or packed
    scores: Annotated[Tensor, Kind(torch.float32)]
    positions: Annotated[Tensor, Kind(torch.int32, empty=-1)]
    # [B, H, 1], the slot that the new token takes; empty.
    free_slot: Annotated[Tensor, Kind(torch.int64, "sequence", changes=True)]
    # [B], those that went through, padding not counted.
    num_real_tokens: Annotated[Tensor, Kind(torch.int64, "sequence", changes=True)]
    # Within each budget + 1; None if all are.
    slot_mask: Annotated[Tensor | None, Kind(torch.bool, "mask", only="rule.is_bounded")] = None
    # Places in the cache when positions roll; not of a layer that rotates nothing.
    ranks: Annotated[
        Tensor | None, Kind(torch.int32, "derived", empty=None, only="position_rule.rolls")
    ] = None
    # [B, 1, S], the KV head of a shared slot; `NO_HEAD`: of none.
    head_of_slot: Annotated[
        Tensor | None, Kind(torch.uint8, "slot", NO_HEAD, iff="head_budgets", file_name="owner")
    ] = None
    key_center: Annotated[Tensor | None, Kind(torch.float32, "head")] = None  # `KeyTransform`
    key_scale: Annotated[Tensor | None, Kind(torch.float32, "head", empty=1)] = None

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True).items()
        cls.kinds = {n: hint.__metadata__[0] for n, hint in hints if get_origin(hint) is Annotated}
        cls.entries = [n for n, kind in cls.kinds.items() if kind == Kind()]
        cls.moving = [n for n, kind in cls.kinds.items() if kind.per == "entry" and kind.dtype]

    @property
    def key_transform(self) -> KeyTransform | None:
        """How keys are transformed before they are packed; ``None``: not at all."""
        if self.key_center is None or self.key_scale is None:
            return None
        return KeyTransform(self.key_center, self.key_scale)

    def of_others(self) -> Tensor:
        """Mark, for each head, the shared slots that are not its own; bool ``[B, H, S]``."""
        assert self.head_of_slot is not None
        count, device = self.free_slot.shape[-1], self.head_of_slot.device
        return self.head_of_slot != _constant(device, _numbers_of_heads, count)


class RotaryTables(NamedTuple):
    """The rotations of rolling positions, which all steps share; fp32 ``[S, R / 2, 2]``."""

    to_rank: Tensor  # the rotation to each rank
    relative: Tensor  # the same as seen from the last rank


class StepNumbers(NamedTuple):
    """What the host knows of a step, where it is the same for all sequences."""

    newest: int  # the position of the new token
    sink: int | None  # protected first positions; None if there are none
    recent: int  # protected newest positions


class QueryRing(NamedTuple):
    """Where steps keep their queries: that of a sequence's token t is at ``t % c``."""

    # n means of the query heads of a KV head, [B, H * n, c, D]; in the blocks of `Indexed` keys,
    # [N, H * n, c, D].
    queries: Tensor
    positions: Tensor | None  # int64 [B, c], where the model has put them, if that is needed
    placed: Tensor | None  # the same of the new tokens, int [B or 1]; None: 0


class StepRules(NamedTuple):
    """What stays the same from step to step."""

    spec: AttentionSpec
    recent: Tensor  # protected newest positions, int64 [B, 1, 1]
    sink: Tensor | None = None  # protected first positions, likewise; None if there are none
    rotary: RotaryTables | None = None  # for rolling positions; None if keys come rotated
    # Of scores, positions and the position of the newest token, fp32 [B, H, S], of which the lowest
    # goes first; None: the scores decide.
    priority: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    full: bool = False  # no slot but the free one is empty, which saves looking for those
    # Whether the step evicts; without, the token takes the next slot, and its layer sees to it that
    # there is one.
    evicts: bool = True
    adds: bool = True  # whether the step adds its probabilities to the scores
    # Saves a CPU operations; None where sequences differ or get padding.
    numbers: StepNumbers | None = None
    # L1 norms of the values, fp32 [B, H, S], by which scores are multiplied; the step adds that of
    # the new one. None: scores stand as they are, or the priority knows.
    weights: Tensor | None = None
    ring: QueryRing | None = None  # where the step keeps its query; None: nowhere
    most_slots: int | None = None  # of a head that shares a row; None if the host does not know
    columns: Tensor | None = None  # int64 [], to which kernels add one; it is their callers' count
    # [B, HQ, 1, Dv], contiguous, into which kernels write; None: into new memory.
    output: Tensor | None = None


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Slots,
    rules: StepRules,
    real: Tensor | None = None,
) -> Tensor:
    """Run one token of each sequence through the slots (arXiv 2306.14048, Algorithm 1).

    Static shapes and no host sync.

    Args:
        query: ``[B, HQ, 1, D]``; un-rotated if there are `RotaryTables`.
        key: ``[B, H, 1, D]``, likewise.
        value: ``[B, H, 1, Dv]``.
        slots: the cached entries; mutated.
        rules: how.
        real: bool ``[B, 1]``, False where the token is padding; ``None`` if all are real.

    Returns:
        ``[B, HQ, 1, Dv]`` in the values' dtype; in the query's if they are packed.
    """
    full = rules.full and real is None
    keep_query(query, key, slots, rules, real)
    query, ranks = rank_new(query, slots, rules, full, real)
    _write_both(slots, key, value)
    write_weight(slots, rules, value)
    write_position(slots, rules.numbers, real)
    slots.scores.scatter_(-1, slots.free_slot, 0.0)
    hidden = None if full else slots.positions < 0
    others = None if slots.head_of_slot is None else slots.of_others()
    if others is not None:
        hidden = others if hidden is None else others | hidden
    output, sums = decode_with_scores(
        query, slots.keys, slots.values, hidden, rules.spec, ranks,
        slots.scores if real is None and rules.adds else None, slots.key_transform,
    )  # fmt: skip
    if real is not None and rules.adds:
        slots.scores.add_(sums * real.unsqueeze(1))
    count = 1 if real is None else real[:, 0]
    if not rules.evicts:
        slots.free_slot.add_(1 if real is None else real.unsqueeze(1))
    elif real is None:
        evict_one(slots, rules, full, slots.num_real_tokens.view(-1, 1, 1), others)
    slots.num_real_tokens.add_(count)
    if rules.evicts and real is not None:
        evict_one(slots, rules, full, slots.num_real_tokens.view(-1, 1, 1) - 1, others)
    return output


def keep_query(
    query: Tensor, key: Tensor, slots: Slots, rules: StepRules, real: Tensor | None = None
) -> None:
    """Write the new tokens' queries into their ring, if there is one; mutates it."""
    if rules.ring is None:
        return
    queries, positions, placed = rules.ring
    means, span = mean_queries(query, key.shape[1]).squeeze(2), queries.shape[2]
    if rules.numbers is not None:
        column = rules.numbers.newest % span
        queries.select(2, column).copy_(means)
        if positions is not None:
            positions[:, column] = 0 if placed is None else placed
        return
    columns = slots.num_real_tokens % span
    rows = blocks = torch.arange(len(query), device=query.device)
    if isinstance(slots.keys, Indexed):
        blocks = slots.keys.block_index
    if real is not None:
        means = torch.where(real.unsqueeze(1), means, queries[blocks, :, columns])
    queries[blocks, :, columns] = means
    if positions is not None:
        new = torch.zeros_like(columns) if placed is None else placed.to(positions.dtype)
        if real is not None:
            new = torch.where(real[:, 0], new, positions[rows, columns])
        positions[rows, columns] = new


def write_weight(slots: Slots, rules: StepRules, value: Tensor) -> None:
    """Write the new values' norms where the rules say so; mutates the weights."""
    if rules.weights is not None:
        norms = value_norms(value).view_as(slots.free_slot)
        rules.weights.scatter_(-1, slots.free_slot, norms)


def write_position(slots: Slots, numbers: StepNumbers | None, real: Tensor | None) -> None:
    """Write the new tokens' positions into the free slots; mutates them."""
    if numbers is not None:
        slots.positions.scatter_(-1, slots.free_slot, numbers.newest)
        return
    position = slots.num_real_tokens.to(torch.int32).view(-1, 1, 1)
    if real is not None:
        position = torch.where(real.unsqueeze(1), position, -1)
    slots.positions.scatter_(-1, slots.free_slot, position.expand_as(slots.free_slot))


def rank_new(
    query: Tensor, slots: Slots, rules: StepRules, full: bool, real: Tensor | None
) -> tuple[Tensor, Ranks | None]:
    """Ranks the new token behind all; padding takes no rank. Mutates the ranks.

    Gives the query ``[B, HQ, 1, D]``, and what all keys are rotated by, if positions roll.
    """
    rotary, ranks = rules.rotary, slots.ranks
    if rotary is None or ranks is None:
        return query, None
    if full:
        # The free slot has the last rank already, and the keys are rotated as seen from there.
        return query, Ranks(rotary.relative, ranks)
    rank = (slots.positions >= 0).sum(dim=-1, keepdim=True)
    # All heads of a row hold the same number of entries.
    query = rotate(query, rotary.to_rank[rank[:, :1]])
    if real is not None:
        rank = torch.where(real.unsqueeze(1), rank, ranks.shape[-1] - 1)
    ranks.scatter_(-1, slots.free_slot, rank.to(torch.int32))
    return query, Ranks(rotary.to_rank, ranks)


def evict_one(
    slots: Slots, rules: StepRules, full: bool, newest: Tensor, others: Tensor | None = None
) -> None:
    """Frees the slot that the next token takes: an empty one, else that of the first to go.

    Args:
        slots: the entries; mutated.
        rules: how.
        full: no slot is empty or out of a budget, which saves looking for those.
        newest: position of the newest token, int64 ``[B, 1, 1]``.
        others: `Slots.of_others`, if it is at hand.
    """
    rank, limits = slots.scores, rules.numbers or (newest, rules.sink, rules.recent)
    if rules.weights is not None:
        rank = rank * rules.weights
    if rules.priority is not None:
        rank = rules.priority(slots.scores, slots.positions, newest)
    # Slots of other heads stand behind all: the newest token is not pinned, so that every head has
    # a finite rank.
    limit = torch.inf if slots.head_of_slot is None else torch.finfo(rank.dtype).max
    rank = rank.masked_fill(protected_entries(slots.positions, *limits), limit)
    if not full:
        rank = rank.masked_fill(slots.positions < 0, -torch.inf)
        if slots.slot_mask is not None:
            rank = rank.masked_fill(~slots.slot_mask, torch.inf)
    free = slots.free_slot
    if slots.head_of_slot is not None:
        others = slots.of_others() if others is None else others
        rank, free = rank.masked_fill(others, torch.inf), free.view(len(free), -1, 1)
    # Of those with the lowest rank the oldest; an addition is cheaper than filling by a mask.
    is_later = rank > rank.amin(dim=-1, keepdim=True)
    age = torch.add(slots.positions, is_later, alpha=BEHIND_ALL)
    # In place: a recorded CUDA graph reads and writes the same memory in every step.
    if torch.compiler.is_compiling():  # where `out` would make it a graph for one batch size
        free.copy_(age.argmin(dim=-1, keepdim=True))
    else:
        torch.argmin(age, dim=-1, keepdim=True, out=free)
    slots.positions.scatter_(-1, slots.free_slot, -1)
    if slots.ranks is not None:
        # The entries behind the freed slot move one rank down. Slots that stay closed (`slot_mask`)
        # move too, but never below a rank that is freed.
        is_behind = slots.ranks > slots.ranks.gather(-1, slots.free_slot)
        slots.ranks.add_(is_behind, alpha=-1)
        slots.ranks.scatter_(-1, slots.free_slot, slots.ranks.shape[-1] - 1)
