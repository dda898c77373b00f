"""What the machine can do: disk, memory, matrix products, and the overhead of a layer."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear

from h2okv.cache import H2OCache
from h2okv.config import CacheConfig
from h2okv.engine.memory import available_bytes
from h2okv.integration.enable import enable
from h2okv.offload.checkpoint import CheckpointFiles

_DISK_BYTES = 256 << 20
_READ_BYTES = 16 << 20
_MIN_READ_BYTES = 1 << 16
_GEMM_ROWS = (1, 8, 32, 256)
_MIN_SECONDS = 0.05
_MIN_RUNS = 5
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
class HardwareProfile:
    """Measured bandwidths in bytes per second, GEMM throughput, and fixed costs.

    Attributes:
        disk: Reading the checkpoint, past the page cache.
        host_device: From the CPU's memory to the device; on a CPU the memory's own bandwidth.
        memory: Reading the device's memory.
        gemm: Floating-point operations per second of a product with a weight matrix, for
            ascending numbers of rows.
        layer_seconds: Of a forward through one layer of next to no size: dispatch of its
            operations and the cache's bookkeeping.
        forward_seconds: The same outside the layers.
    """

    disk: float
    host_device: float
    memory: float
    gemm: tuple[tuple[int, float], ...]
    layer_seconds: float = 0.0
    forward_seconds: float = 0.0

    def gemm_rate(self, rows: int) -> float:
        """Interpolates the GEMM throughput for a number of rows."""
        measured = [own for own, _ in self.gemm]
        index = bisect_left(measured, rows)
        if index in (0, len(measured)):
            return self.gemm[min(index, len(measured) - 1)][1]
        (low, slow), (high, fast) = self.gemm[index - 1], self.gemm[index]
        return slow + (fast - slow) * (rows - low) / (high - low)


def measure_disk(files: CheckpointFiles, read_bytes: int = _READ_BYTES) -> float:
    """Reads a part of a checkpoint past the page cache."""
    buffer = memoryview(bytearray(max(_MIN_READ_BYTES, min(_READ_BYTES, read_bytes))))
    largest = max(range(len(files.paths)), key=lambda index: files.identity[index][1])
    size = min(files.identity[largest][1], _DISK_BYTES)
    files.drop_pages(largest, 0, 0)
    start, done = time.perf_counter(), 0
    while done < size:
        part = min(len(buffer), size - done)
        files.read_into(largest, done, buffer[:part])
        done += part
    seconds = time.perf_counter() - start
    files.drop_pages(largest, 0, 0)
    return done / max(seconds, 1e-9)


def measure_gemm(
    hidden: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, float], ...]:
    """Multiplies rows with matrices of the model's size."""
    # Several matrices, as a model has, so that none of them is in a processor's cache already.
    weights = [torch.randn(width, hidden, device=device).to(dtype) for _ in range(3)]
    found = []
    for rows in _GEMM_ROWS:
        states = torch.randn(rows, hidden, device=device).to(dtype)

        def run(states: torch.Tensor = states) -> None:
            for weight in weights:
                linear(states, weight)

        found.append((rows, len(weights) * 2 * rows * hidden * width / _seconds(run, device)))
    return tuple(found)


def measure_host_device(device: torch.device, num_bytes: int = 64 << 20) -> float:
    """Copies pinned memory to a device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def measure_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Reads, and copies, a buffer that no cache of a processor holds."""
    if num_bytes is None:
        num_bytes = (1 if device.type == "cpu" else 4) << 30
        free = available_bytes(device)
        if free is not None:
            num_bytes = min(num_bytes, free // 8)
    # Ones, not empty: memory that was never written to is no memory yet.
    source = torch.ones(max(num_bytes, 1 << 20) // 4, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    reading = source.nbytes / _seconds(source.sum, device)
    copying = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    return max(reading, copying)


def measure_overhead(
    cache_config: CacheConfig, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Times decode steps of a model of next to no size: seconds of a layer, and of the rest."""
    if cache_config.positions == "clamped":  # for other families than the one that is timed
        cache_config = replace(cache_config, positions="original")
    few, many = (_step_seconds(layers, cache_config, dtype, device) for layers in (1, 5))
    layer = max(0.0, many - few) / 4
    return layer, max(0.0, few - layer)


@torch.inference_mode()
def _step_seconds(
    layers: int, cache_config: CacheConfig, dtype: torch.dtype, device: torch.device
) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import, and rarely needed

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, vocab_size=64,
        num_hidden_layers=layers,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        model: Any = LlamaForCausalLM(config).eval()
    model.to(device=device, dtype=dtype)
    cache = H2OCache.from_config(config, cache_config)
    token = torch.ones((1, 1), dtype=torch.long, device=device)
    with enable(model):
        model(token.expand(1, 32), past_key_values=cache)
        # Not the best, as for bandwidths: what else runs on the machine delays every operation.
        return median(_samples(lambda: model(token, past_key_values=cache), device))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The best of some runs."""
    return min(_samples(run, device))


def _samples(run: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of some runs, after one that does not count."""
    clock = Clock(device)
    samples: list[float] = []
    run()
    while sum(samples) < _MIN_SECONDS or len(samples) < _MIN_RUNS:
        samples.append(clock.seconds(run))
    return samples
