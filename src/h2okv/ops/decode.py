"""One decode step over fixed slots: static shapes, no host sync."""

from __future__ import annotations

import torch


def write_slot(slots: torch.Tensor, free: torch.Tensor, entry: torch.Tensor) -> None:
    """Writes one entry for each sequence and head into its free slot.

    Args:
        slots: ``[B, H, S, D]``, contiguous; mutated.
        free: int64 ``[B, H, 1]``, the slot to take.
        entry: ``[B, H, 1, D]``.
    """
    batch, num_kv_heads, num_slots, size = slots.shape
    rows = torch.arange(batch * num_kv_heads, device=slots.device) * num_slots
    slots.view(-1, size).index_copy_(0, rows + free.view(-1), entry.reshape(-1, size))


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
        keys: ``[B, H, S, D]``.
        values: ``[B, H, S, Dv]``.
        hidden: bool ``[B, H, S]``, slots to leave out; ``None`` if all are entries. A sequence
            with nothing to see gives zeros.
        scale: factor on the logits.
        softcap: as in `reference.attention_with_scores`.

    Returns:
        ``(output, sums)``: output ``[B, HQ, 1, Dv]`` in the query's dtype, sums fp32 ``[B, H, S]``.
    """
    batch, num_heads, _, size = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, size)
    # Logits in fp32 whatever the model's dtype: bf16 logits would move the scores by percents.
    logits = (grouped.to(torch.float32) * scale) @ keys.to(torch.float32).transpose(-1, -2)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if hidden is not None:
        logits = logits.masked_fill(hidden.unsqueeze(2), torch.finfo(torch.float32).min)
    weights = torch.softmax(logits, dim=-1)
    if hidden is not None:
        # The finite floor keeps a sequence without entries free of NaN; zero it here.
        weights = weights.masked_fill(hidden.unsqueeze(2), 0.0)
    output = weights.to(values.dtype) @ values
    return output.view(batch, num_heads, 1, -1), weights.sum(dim=2)
