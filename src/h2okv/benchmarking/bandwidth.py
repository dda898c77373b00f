"""How fast this machine reads its memory, measured in the same run as the caches."""

from __future__ import annotations

import torch

from h2okv.benchmarking.timing import Clock
from h2okv.engine.memory import available_bytes

_CPU_BYTES = 2**30
_GPU_BYTES = 4 * 2**30
_SMALLEST = 2**20
_TRIES = 7


def measure_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Reads, and copies, a buffer that no cache of a processor holds."""
    if num_bytes is None:
        num_bytes = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
        free = available_bytes(device)
        if free is not None:
            num_bytes = min(num_bytes, free // 8)
    length = max(num_bytes, _SMALLEST) // 4
    # Ones, not empty: memory that was never written to is no memory yet.
    source = torch.ones(length, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    clock = Clock(device)
    best = 0.0
    for _ in range(_TRIES):
        best = max(best, source.nbytes / clock.seconds(lambda: source.sum()))
        best = max(best, 2 * source.nbytes / clock.seconds(lambda: target.copy_(source)))
    return best
