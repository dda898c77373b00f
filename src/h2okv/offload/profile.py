"""What this machine can do: disk, memory, arithmetic."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from h2okv.engine.memory import available_bytes
from h2okv.offload.checkpoint import CheckpointFiles

_DISK_BYTES = 256 << 20
_PIECE = 16 << 20
_LEAST_PIECE = 1 << 16
_ROWS = (1, 8, 32, 256)
_LEAST_SECONDS = 0.05
_LEAST_RUNS = 3
"""On a busy machine a single run may have waited for others most of the time."""


@dataclass(frozen=True)
class Clock:
    """Measures calls on a device; a GPU works on after a call has returned."""

    device: torch.device

    def seconds(self, call: Callable[[], object]) -> float:
        """Runs a call, and returns the seconds until its work is done."""
        self._synchronise()
        start = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@dataclass(frozen=True)
class Speeds:
    """Bandwidths in bytes in a second, and products.

    Attributes:
        disk: Reading the checkpoint, not from memory.
        link: From the CPU's memory to the device; that of the memory if the device is the CPU.
        memory: Reading the memory of the device.
        products: For numbers of rows in ascending order, floating-point operations in a second of
            a product with a matrix of the model.
    """

    disk: float
    link: float
    memory: float
    products: tuple[tuple[int, float], ...]

    def product_rate(self, rows: int) -> float:
        """Floating-point operations in a second, for a number of rows between those measured."""
        places = [own for own, _ in self.products]
        index = bisect.bisect_left(places, rows)
        if index == 0:
            return self.products[0][1]
        if index == len(places):
            return self.products[-1][1]
        (low, slow), (high, fast) = self.products[index - 1], self.products[index]
        return slow + (fast - slow) * (rows - low) / (high - low)


def measure_disk(
    files: CheckpointFiles, num_bytes: int = _DISK_BYTES, piece: int = _PIECE
) -> float:
    """Reads a part of a checkpoint that the system does not hold in memory."""
    buffer = memoryview(bytearray(max(_LEAST_PIECE, min(_PIECE, piece))))
    largest = max(range(len(files.paths)), key=lambda index: files.identity[index][1])
    size = min(files.identity[largest][1], num_bytes)
    files.drop_pages(largest, 0, 0)
    start, done = time.perf_counter(), 0
    while done < size:
        part = min(len(buffer), size - done)
        files.read_into(largest, done, buffer[:part])
        done += part
    seconds = time.perf_counter() - start
    files.drop_pages(largest, 0, 0)
    return done / max(seconds, 1e-9)


def measure_products(
    hidden: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, float], ...]:
    """Multiplies rows with a matrix of the model's size."""
    # Several matrices, as a model has, so that none of them is in a processor's cache already.
    weights = [torch.randn(width, hidden, device=device).to(dtype) for _ in range(3)]
    found = []
    for rows in _ROWS:
        states = torch.randn(rows, hidden, device=device).to(dtype)

        def run(states: torch.Tensor = states) -> None:
            for weight in weights:
                linear(states, weight)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        found.append((rows, len(weights) * 2 * rows * hidden * width / _seconds(run)))
    return tuple(found)


def measure_link(device: torch.device, num_bytes: int = 64 << 20) -> float:
    """Copies pinned memory to a device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def run() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return num_bytes / _seconds(run)


def _seconds(run: Callable[[], None]) -> float:
    """The best of some runs, after one that does not count."""
    run()
    best, spent, count = float("inf"), 0.0, 0
    while spent < _LEAST_SECONDS or count < _LEAST_RUNS:
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        best, spent, count = min(best, seconds), spent + seconds, count + 1
    return best


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
