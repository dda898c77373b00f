"""Prefill, decode step and memory of several caches, and the largest batch for a memory."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch

import h2okv
from h2okv.cache.support import context_window
from h2okv.config import CacheConfig, Positions
from h2okv.engine.memory import available_bytes
from h2okv.offload.profile import Clock
from h2okv.records import unknown_name
from h2okv_lab.benchmarking.caches import (
    RUNNERS,
    CacheRunner,
    CacheSpec,
    Peak,
    PeakRun,
    PeakRunFailedError,
    measure_peak,
    one_line,
    prompt_ids,
)
from h2okv_lab.benchmarking.model import Footprint, ModelSource, speedup_limit
from h2okv_lab.benchmarking.results import interleaved, quartiles, ratios, triple
from h2okv_lab.tables import Row, check_distinct, check_minimum


@dataclass(frozen=True)
class Settings:
    """The combinations to measure, and how; the fields are options of `h2okv bench`."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    configs: tuple[CacheConfig, ...]
    caches: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    rounds: int = 5
    steps: int = 8  # of one turn; their mean is one sample
    peak: bool = True
    compiled: bool = False

    def __post_init__(self) -> None:
        check_distinct(contexts=self.contexts, batches=self.batches, budget=self.configs)
        check_distinct(runners=self.caches, dtype=self.dtypes)
        check_minimum(rounds=self.rounds, steps=self.steps)
        check_minimum(8, contexts=min(self.contexts))
        check_minimum(batches=min(self.batches))
        if any(config.is_full for config in self.configs):
            raise ValueError("--budget must not be full; --runners dynamic is the full cache")
        for name in self.caches:
            if name not in RUNNERS:
                raise unknown_name("--runners", name, RUNNERS)
        if self.positions not in ("original", "rolling"):
            raise ValueError(f"positions must be original or rolling, got {self.positions!r}")
        _ = self.evict_every

    @property
    def positions(self) -> Positions:
        """How all caches count positions."""
        positions: Positions = self._of_all("positions")
        return positions

    @property
    def evict_every(self) -> int | None:
        """The blocks in which all caches read a prompt; ``None``: whole."""
        chunk: int | None = self._of_all("chunk", "evict_every")
        return chunk

    def _of_all(self, name: str, shown: str = "") -> Any:
        values = {getattr(config, name) for config in self.configs}
        if len(values) > 1:
            raise ValueError(f"{shown or name} must be the same for all caches, got {values}")
        return values.pop()

    def specs(self) -> list[CacheSpec]:
        """Return all caches to measure on one prompt, those without a budget first."""
        unbounded = [CacheSpec(name) for name in self.caches if not RUNNERS[name].has_budget]
        specs = unbounded + [
            CacheSpec(name, config if name == "h2o" else replace(config, kv_bits=None))
            for config in self.configs
            for name in self.caches
            if RUNNERS[name].has_budget
        ]
        return list({spec.label: spec for spec in specs}.values())

    @property
    def uncounted_steps(self) -> int:
        """Untimed steps at the beginning of a turn; compilation takes several."""
        return 4 if self.compiled else 1

    def check_window(self, window: int | None) -> None:
        """Refuse contexts that exceed the context window with all their steps."""
        context = max(self.contexts)
        steps = self.rounds * (self.uncounted_steps + self.steps)
        if window is not None and context + steps > window:
            raise ValueError(
                f"--contexts {context} and {steps} decode steps are above the model's context"
                f" window of {window} tokens; give a shorter context, or"
                " random weights with another one, such as --shape llama-3-8b,window=65536"
            )


COLUMNS = (
    "model", "dtype", "positions", "context", "batch", "budget", "cache", "spec", "kv_bits",
    "status", "rounds", "steps", "evict_every", "compiled", "entries", "cache_bytes",
    "weight_bytes",
    *triple("prefill"), *triple("decode"), "tokens_per_second", "peak_bytes",
    *triple("prefill_ratio"), *triple("speedup"), "limit", "share", "step_bytes", "achieved",
    "bandwidth",
)  # fmt: skip
"""Columns of one cache in one combination; docs/results/bench.md explains them."""


@dataclass
class Bench(ABC):
    """A measurement of a model in one dtype; bad settings are refused before it is built."""

    source: ModelSource  # other processes build the model from it too
    settings: Settings
    dtype: torch.dtype
    device: torch.device

    columns: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        config = self.source.config()
        h2okv.check_model(config)
        self.settings.check_window(context_window(config))
        for spec in self.settings.specs():
            if spec.name == "h2o" and spec.config is not None:
                h2okv.H2OCache.from_config(config, spec.config)
        self.footprint = Footprint(config, self.dtype, self.settings.positions)
        self.bandwidth: float | None = None  # of the device's memory, in bytes a second
        self.check_fits(self.settings)

    def needed_bytes(self, settings: Settings, batch: int, context: int) -> int:
        """Return a lower bound for one combination: weights, all caches, a block of the prompt."""
        footprint = self.footprint
        # Leave out quantised baselines, whose size depends on their packing.
        unpacked = [spec for spec in settings.specs() if spec.name != "quantized"]
        sizes = [spec.nbytes(footprint, batch, context) for spec in unpacked]
        weights = footprint.weight_bytes
        reading = footprint.prefill_bytes(batch, min(context, settings.evict_every or context))
        # On a CPU peaks are measured in a separate process with its own weights.
        is_apart = settings.peak and self.device.type == "cpu"
        apart = 2 * weights + max(sizes, default=0) if is_apart else 0
        return max(weights + sum(sizes), apart) + reading

    def check_fits(self, settings: Settings) -> None:
        available = available_bytes(self.device)
        for context, batch in product(settings.contexts, settings.batches):
            needed = self.needed_bytes(settings, batch, context)
            if available is not None and needed > available:
                raise ValueError(
                    f"--contexts {context} with --batches {batch} needs at least {needed} bytes"
                    f" ({needed / 2**30:.1f} GiB: weights, caches and one block of the prompt),"
                    f" and {available} bytes ({available / 2**30:.1f} GiB) are available; give"
                    " fewer layers, a smaller batch or context, or fewer --runners"
                )

    def rows(self, report: Callable[[int, str], None], bandwidth: float) -> Iterator[Row]:
        """Build the model, then measure; `num_units` reports."""
        self.report, self.bandwidth = partial(report, 1), bandwidth
        report(0, "building the model")
        self.model = self.source.build(self.dtype, self.device)
        yield from self.measured()
        del self.model  # free memory for the next dtype

    @property
    @abstractmethod
    def num_units(self) -> int:
        """The number of progress reports."""

    @abstractmethod
    def measured(self) -> Iterator[Row]:
        """Measure the model that `rows` has built."""

    def described(self, spec: CacheSpec, context: int) -> dict[str, Any]:
        """Return the columns that describe the run."""
        settings = self.settings
        return {
            "model": self.source.name, "dtype": dtype_name(self.dtype),
            "positions": settings.positions, "context": context, "budget": spec.budget,
            "cache": spec.name, "spec": spec.label, "kv_bits": spec.kv_bits,
            "rounds": settings.rounds, "steps": settings.steps,
            "evict_every": settings.evict_every,
            "compiled": settings.compiled and RUNNERS[spec.name].can_compile,
        }  # fmt: skip

    def peak(self, spec: CacheSpec, context: int, batch: int) -> Peak | None:
        run = PeakRun(
            self.source, self.dtype, self.device, torch.get_num_threads(), spec,
            context, batch, block=self.settings.evict_every,
        )  # fmt: skip
        return measure_peak(run, self.model)

    def time_prompt(self, runner: CacheRunner, ids: torch.Tensor) -> float:
        """Return the seconds of reading a prompt."""
        runner.prepare(ids.shape[1])
        return Clock(ids.device).seconds(partial(runner.prefill, ids))

    def time_steps(self, runner: CacheRunner, token: torch.Tensor) -> float:
        """Return the seconds of one decode step, the mean of one turn."""

        def turn() -> None:
            for _ in range(self.settings.steps):
                runner.step(token)

        # Compile every size statically, like the first one in a process.
        static_shapes = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        with static_shapes, runner.decoding():
            for _ in range(self.settings.uncounted_steps):
                runner.step(token)
            return Clock(token.device).seconds(turn) / self.settings.steps


@dataclass
class _Samples:
    """Seconds of each prompt and of one step, bytes after the last step, and a failure."""

    failure: str
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    kernel: str = ""


class Comparison(Bench):
    """A measurement of all combinations."""

    columns = COLUMNS

    @property
    def num_units(self) -> int:
        settings = self.settings
        able = [spec for spec in settings.specs() if RUNNERS[spec.name].obstacle() is None]
        peaks = sum(RUNNERS[spec.name].reads_prompt for spec in able) if settings.peak else 0
        combinations = len(settings.contexts) * len(settings.batches)
        return combinations * (2 * settings.rounds * len(able) + peaks)

    def measured(self) -> Iterator[Row]:
        settings, specs = self.settings, self.settings.specs()
        for context, batch in product(settings.contexts, settings.batches):
            if settings.compiled:
                torch.compiler.reset()  # drop code for other shapes
            samples = {spec: _Samples(RUNNERS[spec.name].obstacle() or "") for spec in specs}
            self._time(samples, context, batch)
            gc.collect()
            for spec, samples_of_cache in samples.items():
                row = dict.fromkeys(COLUMNS) | self.described(spec, context)
                row |= {"batch": batch, "status": samples_of_cache.failure or "ok"}
                row["bandwidth"] = self.bandwidth
                row["weight_bytes"] = self.footprint.step_weight_bytes
                row["spec"] = ", ".join(filter(None, (spec.label, samples_of_cache.kernel)))
                if not samples_of_cache.failure:
                    row |= self._figures(spec, context, batch, samples)
                yield row

    def _time(self, samples: dict[CacheSpec, _Samples], context: int, batch: int) -> None:
        """Time prompts, then steps on the caches of the last prompts."""
        settings, ids = self.settings, prompt_ids(self.model, batch, context)
        able = (spec for spec, cache_samples in samples.items() if not cache_samples.failure)
        options = settings.evict_every, settings.compiled
        runners = [spec.runner(self.model, *options) for spec in able]
        for name, rounds in (("", 1), ("prompt", settings.rounds), ("decode", settings.rounds)):
            for _, runner in interleaved(runners, rounds):
                cache_samples = samples[runner.spec]
                try:
                    if not cache_samples.failure:
                        self._turn(name, runner, ids, cache_samples)
                except Exception as error:
                    if runner.spec.name != "quantized":  # another package's cache
                        raise
                    cache_samples.failure = f"failed: {one_line(error)}"
                    runner.release()
                if name:
                    self.report(f"{context} x {batch}: {name}, {runner.spec.label}")
        for runner in runners:
            runner.release()

    def _turn(self, name: str, runner: CacheRunner, ids: torch.Tensor, samples: _Samples) -> None:
        if name == "prompt":
            seconds = self.time_prompt(runner, ids)
            samples.prefill += [seconds] if runner.reads_prompt else []
        elif name == "decode":
            samples.decode.append(self.time_steps(runner, ids[:, :1]))
            samples.cache_bytes, samples.kernel = runner.nbytes, runner.kernel
        else:
            # Warm up: the first forward selects algorithms and allocates scratch memory.
            self.time_prompt(runner, ids[:, :64])
            if not self.settings.compiled:  # it would be compiled for this short prompt
                with runner.decoding():
                    runner.step(ids[:, :1])
            runner.release()

    def _figures(
        self, spec: CacheSpec, context: int, batch: int, samples: dict[CacheSpec, _Samples]
    ) -> dict[str, Any]:
        cache_samples, entries, peak = samples[spec], spec.entries(context), None
        if self.settings.peak and cache_samples.prefill:
            with suppress(PeakRunFailedError):  # an empty cell; the times are valid
                peak = self.peak(spec, context, batch)
            self.report(f"{context} x {batch}: memory, {spec.label}")
        # Bytes of the cache that a step must read; of "quantized" those that it stores.
        bytes_read = cache_samples.cache_bytes
        if spec.name != "quantized":
            bytes_read = spec.nbytes(self.footprint, batch, context, free=0)
        weights = self.footprint.step_weight_bytes
        limit = speedup_limit(weights, self.footprint.full_bytes(batch, context), bytes_read)
        decode = quartiles("decode", cache_samples.decode)
        values = {
            "entries": entries,
            "cache_bytes": cache_samples.cache_bytes,
            **quartiles("prefill", cache_samples.prefill),
            **decode,
            "tokens_per_second": batch / decode["decode"],
            "peak_bytes": peak and peak.peak,
            "limit": limit,
            "step_bytes": weights + bytes_read,
            "achieved": (weights + bytes_read) / decode["decode"],
        }
        full = samples.get(CacheSpec("dynamic"))
        if full is not None:
            values |= quartiles("speedup", ratios(full.decode, cache_samples.decode))
            values["share"] = values["speedup"] / limit
            if cache_samples.prefill:
                values |= quartiles("prefill_ratio", ratios(cache_samples.prefill, full.prefill))
        return values


_MOST_CORRECTIONS = 3


@dataclass(frozen=True)
class BatchMemory:
    """Memory by batch: ``weight + runtime + constant + batch * (cache + activation)``, in bytes."""

    weight: int
    runtime: int  # measured: besides the weights, before a forward
    constant: int  # measured: of a forward, for any batch
    cache: int  # of a sequence
    activation: int  # measured: of a forward, for each sequence

    @classmethod
    def of_peaks(cls, weights: int, cache: int, peaks: dict[int, Peak]) -> BatchMemory:
        """Derive the measured terms from the peaks of the smallest and the largest batch."""
        few, many = min(peaks), max(peaks)
        slope = (peaks[many].peak - peaks[few].peak) / (many - few)
        activation = max(0, round(slope) - cache)
        runtime = max(0, peaks[few].loaded - weights)
        constant = peaks[few].peak - peaks[few].loaded - few * (cache + activation)
        return cls(weights, runtime, max(0, constant), cache, activation)

    def bytes(self, batch: int) -> int:
        fixed = self.weight + self.runtime + self.constant
        return fixed + batch * (self.cache + self.activation)

    def largest_batch(self, memory: int) -> int:
        """Return the largest batch that fits; 0 if no sequence does."""
        return max(0, (memory - self.bytes(0)) // max(1, self.cache + self.activation))


MAX_BATCH_COLUMNS = (
    "model", "dtype", "positions", "context", "budget", "cache", "spec", "kv_bits", "rounds",
    "steps", "evict_every", "compiled", "memory_bytes", "weight_bytes", "runtime_bytes",
    "constant_bytes",
    "cache_bytes", "activation_bytes", "max_batch", "is_verified", "peak_bytes", "run_batch",
    *triple("prefill"), *triple("decode"), "tokens_per_second", *triple("throughput_ratio"),
)  # fmt: skip
"""Columns of one cache, budget, context and dtype; see docs/results/bench.md."""


@dataclass
class _Candidate:
    """One cache, its largest batch, and its samples."""

    spec: CacheSpec
    memory: BatchMemory
    max_batch: int
    run_batch: int
    peaks: dict[int, Peak]
    is_verified: bool
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass
class MaxBatch(Bench):
    """A search for the largest batches; ignores the settings' batches and caches."""

    memory: int  # bytes for everything
    max_run_batch: int = 256  # larger batches are calculated but not run

    columns = MAX_BATCH_COLUMNS

    def __post_init__(self) -> None:
        self.settings = replace(self.settings, caches=("dynamic", "h2o"))
        super().__post_init__()

    def check_fits(self, settings: Settings) -> None:
        # Extrapolation starts from batches of one and two, one cache at a time.
        smallest = replace(settings, batches=(2,), caches=("dynamic",), peak=True)
        super().check_fits(smallest)
        weights = self.footprint.weight_bytes
        if weights >= self.memory:
            raise ValueError(
                f"--memory must be above the model's {weights} bytes of weights, got {self.memory};"
                " give more, fewer layers or another --dtype"
            )

    @property
    def num_units(self) -> int:
        """The approximate number of reports; corrections of batches add some."""
        settings = self.settings
        return len(settings.contexts) * len(settings.specs()) * (3 + settings.rounds)

    def measured(self) -> Iterator[Row]:
        settings = self.settings
        for context in settings.contexts:
            candidates = [self._candidate(spec, context) for spec in settings.specs()]
            runnable = [candidate for candidate in candidates if candidate.run_batch]
            for _, candidate in interleaved(runnable, settings.rounds):
                ids = prompt_ids(self.model, candidate.run_batch, context)
                runner = candidate.spec.runner(self.model, settings.evict_every, settings.compiled)
                candidate.prefill.append(self.time_prompt(runner, ids))
                candidate.decode.append(self.time_steps(runner, ids[:, :1]))
                runner.release()  # the caches of two candidates do not fit at once
                self.report(f"{context}: batch {candidate.run_batch}, {candidate.spec.label}")
            for candidate in candidates:
                yield self._row(candidate, candidates[0], context)

    def _candidate(self, spec: CacheSpec, context: int) -> _Candidate:
        """Calculate the largest batch, and correct it by running it."""
        cache = spec.nbytes(self.footprint, 1, context)
        weights = self.footprint.weight_bytes
        peaks = {batch: self._peak(spec, context, batch) for batch in (1, 2)}
        while True:
            # Extrapolating from one and two sequences is inexact, from larger batches less so.
            # Clamp the prediction to what the measurements allow.
            memory = BatchMemory.of_peaks(weights, cache, peaks)
            fitting = [batch for batch, peak in peaks.items() if peak.peak <= self.memory]
            above = [batch - 1 for batch in peaks if batch not in fitting]
            largest = min([max([memory.largest_batch(self.memory), *fitting]), *above])
            if len(peaks) > 1 + _MOST_CORRECTIONS:  # prediction and measurements do not converge
                largest = max(fitting, default=0)
            runnable = 0 < largest <= self.max_run_batch and self._has_room(memory, largest)
            if largest in peaks or not runnable:
                break
            try:
                peaks[largest] = self._peak(spec, context, largest)
            except PeakRunFailedError:
                break
        run = min(largest, self.max_run_batch)
        while run and not self._has_room(memory, run):
            run //= 2
        return _Candidate(spec, memory, largest, run, peaks, largest in fitting)

    def _has_room(self, memory: BatchMemory, batch: int) -> bool:
        """Return whether this machine, with the model loaded here too, can run a batch."""
        available = available_bytes(self.device)
        loaded = memory.weight if self.device.type == "cpu" else 0
        return available is None or memory.bytes(batch) - memory.weight + loaded <= available

    def _peak(self, spec: CacheSpec, context: int, batch: int) -> Peak:
        peak = self.peak(spec, context, batch)
        self.report(f"{context}: memory of batch {batch}, {spec.label}")
        if peak is None:
            raise ValueError(
                "--memory needs a process's memory, which this system does not report; use"
                " Linux, or a GPU"
            )
        return peak

    def _row(self, candidate: _Candidate, full: _Candidate, context: int) -> Row:
        peak = candidate.peaks.get(candidate.run_batch)
        row: dict[str, Any] = dict.fromkeys(MAX_BATCH_COLUMNS)
        row |= self.described(candidate.spec, context)
        row |= {f"{name}_bytes": value for name, value in asdict(candidate.memory).items()}
        row |= {n: getattr(candidate, n) for n in ("max_batch", "is_verified", "run_batch")}
        row |= {"memory_bytes": self.memory, "peak_bytes": peak and peak.peak}
        row |= quartiles("prefill", candidate.prefill) | quartiles("decode", candidate.decode)
        if candidate.decode:
            row["tokens_per_second"] = candidate.run_batch / row["decode"]
        if candidate.decode and full.decode:
            speeds, full_speeds = ([c.run_batch / s for s in c.decode] for c in (candidate, full))
            row |= quartiles("throughput_ratio", ratios(speeds, full_speeds))
        return row


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
