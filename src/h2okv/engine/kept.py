"""What a cache still holds of the tokens that it has seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from h2okv.cache.slot_pool import SlotPool
from h2okv.engine.outputs import KeptTokens


def count_kept(positions: Iterable[Tensor], num_tokens: int) -> list[int]:
    """Counts for each token the heads that hold it, given int positions ``[H, S]`` by layer."""
    held = torch.cat([own.flatten().cpu() for own in positions]).long()
    # -1 is an empty slot.
    counts: list[int] = torch.bincount(held + 1, minlength=num_tokens + 1)[1:].tolist()
    return counts


def kept_tokens(pool: SlotPool, place: int, num_seen: int) -> KeptTokens:
    """Tells what a sequence in the pool holds; waits for the device."""
    layers: list[Any] = pool.cache.layers
    cache_bytes = 0.0
    for state in (layer.state for layer in layers):
        num_held = int((state.positions[place] >= 0).sum())
        cache_bytes += num_held * state.nbytes / state.positions.numel()
    scored = [layer.state.positions[place] for layer in layers if layer.window is None]
    return KeptTokens(
        counts=tuple(count_kept(scored, num_seen)),
        num_heads=pool.num_heads,
        cache_bytes=int(cache_bytes),
        full_bytes=pool.full_bytes_of(num_seen),
    )
