"""One decode step over fixed slots: static shapes, no host sync."""

from __future__ import annotations

import torch


def write_slot(slots: torch.Tensor, free: torch.Tensor, entry: torch.Tensor) -> None:
    """Writes one entry for each sequence and head into its free slot.

    Args:
        slots: ``[B, H, S, D]``; mutated.
        free: int64 ``[B, H, 1]``, the slot to take.
        entry: ``[B, H, 1, D]``.
    """
    slots.scatter_(2, free.unsqueeze(-1).expand_as(entry), entry)


def decode_with_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
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

    Returns:
        ``(output, sums)``: output ``[B, HQ, 1, Dv]`` in the query's dtype, sums fp32 ``[B, H, S]``.
    """
    batch, num_heads, _, size = query.shape
    num_kv_heads, num_slots = keys.shape[1], keys.shape[2]
    rows = batch * num_kv_heads
    grouped = query.reshape(rows, num_heads // num_kv_heads, size)
    flat_keys, flat_values = keys.view(rows, num_slots, size), values.view(rows, num_slots, -1)
    # Logits in fp32 whatever the model's dtype: bf16 logits would move the scores by percents.
    logits = torch.bmm(grouped.float() * scale, flat_keys.float().transpose(1, 2))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if hidden is not None:
        unseen = hidden.view(rows, 1, num_slots)
        logits = logits.masked_fill(unseen, torch.finfo(torch.float32).min)
    weights = torch.softmax(logits, dim=-1)
    if hidden is not None:
        # The finite floor keeps a sequence without entries free of NaN; zero it here.
        weights = weights.masked_fill(unseen, 0.0)
    output = torch.bmm(weights.to(values.dtype), flat_values)
    # A sum over one query head would be a copy.
    sums = weights if num_heads == num_kv_heads else weights.sum(dim=1)
    return (
        output.view(batch, num_heads, 1, -1),
        sums.view(batch, num_kv_heads, num_slots),
    )
