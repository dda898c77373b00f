"""One decode step over fixed slots: static shapes, no host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch

from h2okv.ops.packed_decode import packed_logits, packed_output
from h2okv.ops.packing import Entries, Packed, pack
from h2okv.ops.rotary import Scratch, turn, turn_gathered

_TURN_ELEMENTS = 5 << 17
"""Numbers of keys turned at a time on a CPU: 2.5 MiB in fp32, which its cache holds."""

_FUSED_GROUPS = 8
"""Query heads of a KV head up to which its keys are better read for each of them than once."""


class Ranks(NamedTuple):
    """Where keys that are not turned yet belong.

    Attributes:
        factors: fp32 ``[n, R / 2, 2]``, the turn to each rank.
        ranks: int32 ``[B, H, S]``, below n, whatever it is for slots that are hidden.
    """

    factors: torch.Tensor
    ranks: torch.Tensor


def write_slot(slots: Entries, free: torch.Tensor, entry: torch.Tensor) -> None:
    """Writes one entry for each sequence and head into its free slot.

    Args:
        slots: ``[B, H, S, D]``, contiguous or packed; mutated.
        free: int64 ``[B, H, 1]``, the slot to take.
        entry: ``[B, H, 1, D]``.
    """
    if isinstance(slots, Packed):
        packed = pack(entry, slots.bits)
        write_slot(slots.codes, free, packed.codes)
        write_slot(slots.grid, free, packed.grid)
        return
    batch, heads, num_slots, size = slots.shape
    first = torch.arange(0, batch * heads * num_slots, num_slots, device=slots.device)
    # scatter_ would copy all slots of a bf16 tensor on a CPU (torch 2.13).
    slots.view(-1, size).index_copy_(0, first + free.flatten(), entry.reshape(-1, size))


def decode_with_scores(
    query: torch.Tensor,
    keys: Entries,
    values: Entries,
    hidden: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    ranks: Ranks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with one query over all slots.

    Args:
        query: ``[B, HQ, 1, D]``.
        keys: ``[B, H, S, D]``, contiguous or packed. A hidden slot may hold anything.
        values: ``[B, H, S, Dv]``, likewise. A hidden slot may hold anything finite: its
            probability is zero, and zero times NaN would still be NaN.
        hidden: bool ``[B, H, S]``, slots to leave out; ``None`` if all are entries. A sequence
            with nothing to see gives zeros.
        scale: factor on the logits.
        softcap: as in `reference.attention_with_scores`.
        ranks: turns that the keys, but not the query, still need; ``None`` if none.

    Returns:
        ``(output, sums)``: output ``[B, HQ, 1, Dv]`` in the query's dtype, sums fp32 ``[B, H, S]``.
    """
    batch, num_heads, _, size = query.shape
    num_kv_heads, num_slots = keys.shape[1], keys.shape[2]
    rows = batch * num_kv_heads
    grouped = query.reshape(rows, num_heads // num_kv_heads, size)
    # Logits in fp32 whatever the model's dtype: bf16 logits would move the scores by percents.
    logits = _logits(grouped.float() * scale, _by_row(keys), ranks)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if hidden is not None:
        unseen = hidden.view(rows, 1, num_slots)
        logits = logits.masked_fill(unseen, torch.finfo(torch.float32).min)
    weights = torch.softmax(logits, dim=-1)
    if hidden is not None:
        # The finite floor keeps a sequence without entries free of NaN; zero it here.
        weights = weights.masked_fill(unseen, 0.0)
    output = _output(weights, _by_row(values), query.dtype)
    # A sum over one query head would be a copy.
    sums = weights if num_heads == num_kv_heads else weights.sum(dim=1)
    return (
        output.view(batch, num_heads, 1, -1),
        sums.view(batch, num_kv_heads, num_slots),
    )


def _by_row(entries: Entries) -> Entries:
    """Entries ``[B, H, S, D]`` as ``[B * H, S, D]``."""
    if isinstance(entries, Packed):
        return entries.with_parts(entries.codes.flatten(0, 1), entries.grid.flatten(0, 1))
    return entries.view(-1, *entries.shape[2:])


def _fuses(groups: int, device: torch.device) -> bool:
    """Whether products are written as loops.

    Inductor makes one loop of conversion, product and sum, which a matrix product breaks up.
    """
    return torch.compiler.is_compiling() and device.type == "cpu" and groups <= _FUSED_GROUPS


def _logits(scaled: torch.Tensor, keys: Entries, ranks: Ranks | None) -> torch.Tensor:
    """Logits ``[rows, G, S]`` of queries ``[rows, G, D]`` and keys ``[rows, S, D]``."""
    if isinstance(keys, Packed):
        if ranks is None:
            return packed_logits(scaled, keys)
        return packed_logits(scaled, keys, ranks.factors, ranks.ranks.flatten(0, 1))
    if ranks is not None and not torch.compiler.is_compiling():
        return _logits_at_ranks(scaled, keys, ranks)
    turned = keys.float()
    if ranks is not None:
        turned = turn(keys, ranks.factors[ranks.ranks.reshape(keys.shape[:2])])
    if _fuses(scaled.shape[1], scaled.device):
        return (scaled.unsqueeze(2) * turned.unsqueeze(1)).sum(dim=-1)
    return torch.bmm(scaled, turned.transpose(1, 2))


def _output(weights: torch.Tensor, values: Entries, dtype: torch.dtype) -> torch.Tensor:
    """Sums ``[rows, G, Dv]`` of values ``[rows, S, Dv]``."""
    if isinstance(values, Packed):
        return packed_output(weights, values).to(dtype)
    if _fuses(weights.shape[1], weights.device):
        output = (weights.unsqueeze(-1) * values.float().unsqueeze(1)).sum(dim=2)
        return output.to(values.dtype)
    return torch.bmm(weights.to(values.dtype), values)


def _logits_at_ranks(query: torch.Tensor, keys: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Logits ``[rows, G, S]`` of keys ``[rows, S, D]`` at their ranks, piece by piece; eager."""
    count, num_slots, size = keys.shape
    table = ranks.factors
    index = ranks.ranks.reshape(count, num_slots)
    step = count
    if keys.device.type == "cpu":
        step = max(1, min(count, _TURN_ELEMENTS // (num_slots * size)))
    logits = query.new_empty(count, query.shape[1], num_slots)
    scratch = Scratch.for_keys(keys, table, step)
    for start in range(0, count, step):
        at = slice(start, start + step)
        turned = turn_gathered(keys[at], table, index[at], scratch)
        torch.bmm(query[at], turned.transpose(1, 2), out=logits[at])
    return logits
