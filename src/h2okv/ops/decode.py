"""One decode step over fixed slots: static shapes, no host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch

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


def write_slot(slots: torch.Tensor, free: torch.Tensor, entry: torch.Tensor) -> None:
    """Writes one entry for each sequence and head into its free slot.

    Args:
        slots: ``[B, H, S, D]``, contiguous; mutated.
        free: int64 ``[B, H, 1]``, the slot to take.
        entry: ``[B, H, 1, D]``.
    """
    batch, heads, num_slots, size = slots.shape
    first = torch.arange(0, batch * heads * num_slots, num_slots, device=slots.device)
    # scatter_ would copy all slots of a bf16 tensor on a CPU (torch 2.13).
    slots.view(-1, size).index_copy_(0, first + free.flatten(), entry.reshape(-1, size))


def decode_with_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    ranks: Ranks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with one query over all slots.

    Args:
        query: ``[B, HQ, 1, D]``.
        keys: ``[B, H, S, D]``, contiguous. A hidden slot may hold anything.
        values: ``[B, H, S, Dv]``, contiguous. A hidden slot may hold anything finite: its
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
    flat_keys, flat_values = keys.view(rows, num_slots, size), values.view(rows, num_slots, -1)
    # Logits in fp32 whatever the model's dtype: bf16 logits would move the scores by percents.
    scaled = grouped.float() * scale
    # Inductor makes one loop of conversion, product and sum, which a matrix product breaks up.
    fuses = torch.compiler.is_compiling() and query.device.type == "cpu"
    fuses = fuses and grouped.shape[1] <= _FUSED_GROUPS
    if ranks is not None and not torch.compiler.is_compiling():
        logits = _logits_at_ranks(scaled, flat_keys, ranks)
    else:
        turned = flat_keys.float()
        if ranks is not None:
            turned = turn(flat_keys, ranks.factors[ranks.ranks.reshape(rows, num_slots)])
        if fuses:
            logits = (scaled.unsqueeze(2) * turned.unsqueeze(1)).sum(dim=-1)
        else:
            logits = torch.bmm(scaled, turned.transpose(1, 2))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if hidden is not None:
        unseen = hidden.view(rows, 1, num_slots)
        logits = logits.masked_fill(unseen, torch.finfo(torch.float32).min)
    weights = torch.softmax(logits, dim=-1)
    if hidden is not None:
        # The finite floor keeps a sequence without entries free of NaN; zero it here.
        weights = weights.masked_fill(unseen, 0.0)
    if fuses:
        output = (weights.unsqueeze(-1) * flat_values.float().unsqueeze(1)).sum(dim=2)
        output = output.to(values.dtype)
    else:
        output = torch.bmm(weights.to(values.dtype), flat_values)
    # A sum over one query head would be a copy.
    sums = weights if num_heads == num_kv_heads else weights.sum(dim=1)
    return (
        output.view(batch, num_heads, 1, -1),
        sums.view(batch, num_kv_heads, num_slots),
    )


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
