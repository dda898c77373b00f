"""Measure the machine: disk, memory, matrix products, and the overhead of a layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, silu

from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.engine.memory import MemoryModel, available_bytes
from h2okv.integration.enable import enable
from h2okv.offload.checkpoint import CheckpointFiles

_DISK_BYTES = 256 << 20
_MIN_READ_BYTES = 1 << 16
_SAMPLE_BYTES = 64 << 20
_MIN_SAMPLE_BYTES = 1 << 20
_GEMM_ROWS = (1, 8, 32, 256)
_SEQUENCES = 16  # of a step that is compared with a step of one sequence
_MAX_PROMPT = 512  # tokens that are timed, to be quick; each token of longer prompts takes longer
_STATES_WRITTEN = 17  # times that norms, rotations and sums of a layer write a token's states
_MIN_SECONDS = 0.05
_MIN_RUNS = 5  # on a busy machine a single run may mostly wait for other processes


@dataclass(frozen=True)
class Clock:
    """A timer of calls on a device; waits for a GPU, which works on after a call returns."""

    device: torch.device

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call, including its work on the device."""
        self._synchronise()
        start = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - start

    def samples(self, call: Callable[[], object]) -> list[float]:
        """Return the seconds of each run, at least a few of them, after a warm-up run."""
        seconds: list[float] = []
        call()
        while sum(seconds) < _MIN_SECONDS or len(seconds) < _MIN_RUNS:
            seconds.append(self.seconds(call))
        return seconds

    def _synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@dataclass(frozen=True)
class HardwareProfile:
    """Measured bandwidths in bytes per second, GEMM throughput, and fixed costs."""

    disk: float  # reading the checkpoint, past the page cache
    host_device: float  # from the CPU's memory to the device; on a CPU as memory
    memory: float  # reading the device's memory
    # Floating-point operations per second of a product with a weight matrix, for ascending numbers
    # of rows.
    gemm: tuple[tuple[int, float], ...]
    # Fixed seconds of a forward: of a tiny layer, for dispatch of its operations and the cache's
    # bookkeeping, and the same outside the layers.
    layer_seconds: float = 0.0
    forward_seconds: float = 0.0
    # Further seconds of a layer's attention and cache: in a step for each entry of a sequence, and
    # for each token of a prompt.
    entry_seconds: float = 0.0
    token_seconds: float = 0.0

    def gemm_rate(self, rows: int) -> float:
        at, rates = zip(*self.gemm, strict=True)
        return float(np.interp(rows, at, rates))


def measure_hardware(
    files: CheckpointFiles,
    memory: MemoryModel,
    prompt: int,
    dtype: torch.dtype,
    device: torch.device,
    room: int,
) -> HardwareProfile:
    """Measure the machine in a second or two, with samples of at most ``room`` bytes."""
    # A quarter each for the buffer and its copy, and for the matrices of the products.
    quarter = max(_MIN_SAMPLE_BYTES, room // 4)
    sample = min(_SAMPLE_BYTES, quarter)
    bandwidth = measure_bandwidth(device, sample if device.type == "cpu" else None)
    link = bandwidth
    if device.type != "cpu":
        source = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=device)
        copies = Clock(device).samples(lambda: target.copy_(source, non_blocking=True))
        link = _SAMPLE_BYTES / min(copies)
    width = max(1, min(memory.width, quarter // (memory.hidden * 16)))
    layers = len(memory.cache.layers)
    gemm = measure_gemm(memory.hidden, width, quarter, layers, dtype, device)
    read_bytes = max(_MIN_READ_BYTES, sample // 4)
    disk = measure_disk(files, read_bytes)
    overhead = measure_overhead(memory, min(prompt, _MAX_PROMPT), dtype, device)
    return HardwareProfile(disk, link, bandwidth, gemm, **overhead)


def measure_disk(files: CheckpointFiles, read_bytes: int) -> float:
    """Return the bytes per second of reading a checkpoint past the page cache, up to a limit."""
    buffer = memoryview(bytearray(read_bytes))
    size, largest = max((size, number) for number, (_, size, _) in enumerate(files.identity))
    size, read = min(size, _DISK_BYTES), 0
    files.drop_pages(largest, 0, 0)
    start = time.perf_counter()
    while read < size:
        files.read_into(largest, read, view := buffer[: size - read])
        files.drop_pages(largest, read, len(view))
        read += len(view)
    return read / max(time.perf_counter() - start, 1e-9)


def measure_gemm(
    hidden: int, width: int, room: int, layers: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, float], ...]:
    """Return the operations per second of gated MLPs of these sizes, for `_GEMM_ROWS` rows."""
    # More than a processor's cache holds, because a model's weights come from memory, but no
    # more layers than the model has: a tiny one's weights stay in the processor's cache.
    each = 3 * width * hidden
    size = each * dtype.itemsize
    count = max(1, min(-(-_SAMPLE_BYTES // size), room // size, layers))
    make = partial(torch.randn, dtype=dtype, device=device)
    gates, ups, downs = (make(count, *shape) for shape in [(width, hidden)] * 2 + [(hidden, width)])

    def multiply(states: torch.Tensor) -> None:
        for gate, up, down in zip(gates, ups, downs, strict=True):
            linear(silu(linear(states, gate)) * linear(states, up), down)

    rates = []
    for rows in _GEMM_ROWS:
        seconds = min(Clock(device).samples(partial(multiply, make(rows, hidden))))
        rates.append((rows, 2 * rows * count * each / seconds))
    return tuple(rates)


def measure_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Return the bytes per second of reading or copying a buffer larger than any CPU cache."""
    if num_bytes is None:
        num_bytes = (1 if device.type == "cpu" else 4) << 30
        free = available_bytes(device)
        num_bytes = num_bytes if free is None else min(num_bytes, free // 8)
    # Ones, not empty: memory is allocated only when it is written to.
    source = torch.ones(max(num_bytes, 1 << 20) // 4, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    clock = Clock(device)
    reading = source.nbytes / min(clock.samples(source.sum))
    return max(reading, 2 * source.nbytes / min(clock.samples(lambda: target.copy_(source))))


def measure_overhead(
    memory: MemoryModel, prompt: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Time steps and prompts of a very narrow model with the heads of this one."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import, and rarely needed

    cache_config = memory.cache.cache_config
    kind = cache_config.positions
    kind = "original" if kind == "clamped" else kind  # which the family that is timed has not
    cache_config = replace(cache_config, positions=kind, layer_budgets=None)
    sizes: Any = {
        "hidden_size": 8 * memory.num_heads,
        "intermediate_size": 64,
        "vocab_size": 64,
        "num_attention_heads": memory.num_heads,
        "num_key_value_heads": memory.num_kv_heads,
        "head_dim": memory.key_size,
    }
    seconds: dict[str, list[float]] = {"step": [], "steps": [], "prompt": []}
    for layers in (1, 5):
        config = LlamaConfig(num_hidden_layers=layers, **sizes)
        with torch.random.fork_rng([]):
            model: Any = LlamaForCausalLM(config).eval()
        model.to(device=device, dtype=dtype)
        tokens = torch.ones((1, prompt), dtype=torch.long, device=device)

        def read(config: Any = config, model: Any = model, tokens: Any = tokens) -> H2OCache:
            cache = H2OCache.from_config(config, cache_config)
            model(tokens, logits_to_keep=1, **{CACHE: cache})
            return cache

        with torch.inference_mode(), enable(model):
            # The median, not the best as for bandwidths: other processes delay every operation.
            for name, batch in (("step", 1), ("steps", _SEQUENCES)):
                cache = read()
                cache.batch_repeat_interleave(batch)
                step = partial(model, tokens[:, :1].expand(batch, 1), **{CACHE: cache})
                seconds[name].append(median(Clock(device).samples(step)))
            seconds["prompt"].append(median(Clock(device).samples(read)))
    layer, steps, read_once = (max(0.0, more - fewer) / 4 for fewer, more in seconds.values())
    states = torch.ones((prompt, memory.hidden), dtype=dtype, device=device)
    # If the C library returns every large block, a result is new memory, page by page.
    write = median(Clock(device).samples(lambda: states + states)) / prompt
    slots = memory.cache.slots_for(prompt, _MIN_RUNS)
    return {
        "layer_seconds": layer,
        "forward_seconds": max(0.0, seconds["step"][0] - layer),
        "entry_seconds": max(0.0, steps - layer) / ((_SEQUENCES - 1) * slots),
        "token_seconds": max(0.0, read_once - layer) / prompt + _STATES_WRITTEN * write,
    }
