"""Moving what stays after a block into its slots, as a Triton kernel: one copy instead of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 32
"""Slots that a program fills."""


@triton.jit
def _compact(
    entries, indices, slots, entry_b, entry_h, entry_n, count, num_slots,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.arange(0, BLOCK_D)
    kept = places < count
    index = tl.load(indices + row * count + places, mask=kept, other=0)
    some = tl.load(
        entries + batch * entry_b + head * entry_h + index[:, None] * entry_n + numbers[None, :],
        mask=kept[:, None] & (numbers < D)[None, :], other=0.0,
    )  # fmt: skip
    tl.store(
        slots + (row * num_slots + places)[:, None] * D + numbers[None, :], some,
        mask=(places < num_slots)[:, None] & (numbers < D)[None, :],
    )  # fmt: skip


def compact(entries: torch.Tensor, indices: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Copies whole entries into the first of new slots.

    Args:
        entries: as in `h2okv.ops.compaction.compact`.
        indices: likewise.
        num_slots: likewise.

    Returns:
        ``[B, H, S, D]``, contiguous; zero beyond K.
    """
    if entries.stride(-1) != 1:
        entries = entries.contiguous()
    batch, heads, count = indices.shape
    size = entries.shape[-1]
    slots = entries.new_empty(batch, heads, num_slots, size)
    _compact[(batch * heads, triton.cdiv(num_slots, _BLOCK))](
        entries, indices.contiguous(), slots, *entries.stride()[:3], count, num_slots,
        HEADS=heads, D=size, BLOCK_D=triton.next_power_of_2(size), BLOCK=_BLOCK,
    )  # fmt: skip
    return slots
