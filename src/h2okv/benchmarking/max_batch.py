"""The largest batch that a memory holds, full cache against H2O, and how fast it is there.

Throughput by larger batches is the way in which the paper (arXiv 2306.14048, section 5.2) turns a
smaller cache into speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from h2okv.benchmarking.caches import CacheSpec
from h2okv.benchmarking.comparison import Settings, static_shapes, time_steps
from h2okv.benchmarking.memory import Footprint
from h2okv.benchmarking.model import ModelSource
from h2okv.benchmarking.peak import (
    Peak,
    PeakRun,
    PeakRunFailedError,
    dtype_name,
    measure_peak,
    prompt_ids,
)
from h2okv.benchmarking.timing import ResultRow, Spread, interleaved
from h2okv.engine.memory import available_bytes
from h2okv.offload.profile import Clock

_MOST_CORRECTIONS = 3


@dataclass(frozen=True)
class BatchMemory:
    """Memory by batch: ``fixed + batch * (cache + activation)``, in bytes.

    Attributes:
        weights: Weights of the model, by arithmetic.
        runtime: What the process or the device holds beside them, measured.
        constant: What a forward needs for any batch, measured.
        cache: Of one sequence after its prompt, by arithmetic.
        activation: What a forward needs beside that for each sequence, measured.
    """

    weights: int
    runtime: int
    constant: int
    cache: int
    activation: int

    @classmethod
    def of_peaks(cls, weights: int, cache: int, peaks: dict[int, Peak]) -> BatchMemory:
        """Finds the measured parts from the peaks of the smallest and the largest batch."""
        few, many = min(peaks), max(peaks)
        slope = (peaks[many].peak - peaks[few].peak) / (many - few)
        activation = max(0, round(slope) - cache)
        runtime = max(0, peaks[few].loaded - weights)
        rest = peaks[few].peak - peaks[few].loaded - few * (cache + activation)
        return cls(weights, runtime, max(0, rest), cache, activation)

    def bytes(self, batch: int) -> int:
        """What a batch needs at most."""
        fixed = self.weights + self.runtime + self.constant
        return fixed + batch * (self.cache + self.activation)

    def largest_batch(self, memory: int) -> int:
        """The largest batch that fits; 0 if not even one sequence does."""
        return max(0, (memory - self.bytes(0)) // max(1, self.cache + self.activation))


@dataclass(frozen=True)
class MaxBatchRow(ResultRow):
    """What was found for one cache, budget, context and dtype; see docs/benchmarking.md."""

    model: str
    dtype: str
    positions: str
    context: int
    budget: int | float | None
    cache: str
    kv_bits: int | None
    rounds: int
    steps: int
    prefill_chunk: int | None
    compiled: bool
    memory_bytes: int
    weight_bytes: int
    runtime_bytes: int
    constant_bytes: int
    cache_bytes: int
    activation_bytes: int
    max_batch: int
    is_verified: bool
    peak_bytes: int | None
    run_batch: int
    prefill: Spread | None = None
    decode: Spread | None = None
    tokens_per_second: float | None = None
    throughput_ratio: Spread | None = None


@dataclass
class _Candidate:
    """One cache, how large a batch it may have, and its samples."""

    spec: CacheSpec
    memory: BatchMemory
    max_batch: int
    run_batch: int
    peaks: dict[int, Peak]
    is_verified: bool
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class MaxBatch:
    """Finds the largest batches for a model of one dtype; arguments as of `Comparison`.

    Of the settings, batches and caches are not read. `memory` is given in bytes for everything;
    batches above `max_run_batch` are not really run.
    """

    model: PreTrainedModel
    source: ModelSource
    footprint: Footprint
    settings: Settings
    memory: int
    max_run_batch: int
    report: Callable[[str], None]

    @staticmethod
    def specs(settings: Settings) -> list[CacheSpec]:
        """The caches that are compared: the full one first."""
        return [CacheSpec("dynamic")] + [
            CacheSpec.of("h2o", budget, positions=settings.positions, kv_bits=bits)
            for budget in settings.budgets
            for bits in (None, *settings.kv_bits)
        ]

    @classmethod
    def count_units(cls, settings: Settings) -> int:
        """How often one dtype reports, about."""
        return len(settings.contexts) * len(cls.specs(settings)) * (3 + settings.rounds)

    def rows(self) -> Iterator[MaxBatchRow]:
        """Measures all contexts; a context's rows come when it is done."""
        for context in self.settings.contexts:
            candidates = [self._candidate(spec, context) for spec in self.specs(self.settings)]
            runnable = [candidate for candidate in candidates if candidate.run_batch]
            for _, candidate in interleaved(runnable, self.settings.rounds):
                self._turn(candidate, context)
                self.report(f"{context}: batch {candidate.run_batch}, {candidate.spec.label}")
            for candidate in candidates:
                yield self._row(candidate, candidates[0], context)

    def _candidate(self, spec: CacheSpec, context: int) -> _Candidate:
        """Finds the largest batch by arithmetic, and corrects it by running it."""
        cache = self.footprint.cache_bytes(spec, 1, context)
        weights = self.footprint.weight_bytes
        peaks = {batch: self._peak(spec, context, batch) for batch in (1, 2)}
        memory = BatchMemory.of_peaks(weights, cache, peaks)
        largest = memory.largest_batch(self.memory)
        for _ in range(_MOST_CORRECTIONS):
            runnable = 0 < largest <= self.max_run_batch and self._has_room(memory, largest)
            if largest in peaks or not runnable:
                break
            try:
                peaks[largest] = self._peak(spec, context, largest)
            except PeakRunFailedError:
                break
            # One and two sequences make a short line; a longer one predicts better.
            memory = BatchMemory.of_peaks(weights, cache, peaks)
            largest = self._between_measured(memory.largest_batch(self.memory), peaks)
        else:
            # The line and the measurements do not meet: the largest that did fit.
            largest = max((b for b, p in peaks.items() if p.peak <= self.memory), default=0)
        verified = largest in peaks and peaks[largest].peak <= self.memory
        run = min(largest, self.max_run_batch)
        while run and not self._has_room(memory, run):
            run //= 2
        return _Candidate(spec, memory, largest, run, peaks, verified)

    def _between_measured(self, batch: int, peaks: dict[int, Peak]) -> int:
        """Moves a predicted batch to where the measurements leave it."""
        fitting = [b for b, peak in peaks.items() if peak.peak <= self.memory]
        failing = [b for b, peak in peaks.items() if peak.peak > self.memory]
        return min([max([batch, *fitting]), *(b - 1 for b in failing)])

    def _has_room(self, memory: BatchMemory, batch: int) -> bool:
        """Whether this machine, the model loaded here too, can run a batch."""
        available = available_bytes(self.model.device)
        own = memory.weights if self.model.device.type == "cpu" else 0
        return available is None or memory.bytes(batch) - memory.weights + own <= available

    def _peak(self, spec: CacheSpec, context: int, batch: int) -> Peak:
        chunk = self.settings.prefill_chunk
        peak = measure_peak(
            PeakRun.on(self.model, self.source, spec, context, batch, chunk), self.model
        )
        self.report(f"{context}: memory of batch {batch}, {spec.label}")
        if peak is None:
            raise ValueError(
                "this system does not tell a process's memory, which --max-batch needs; use Linux,"
                " or a GPU"
            )
        return peak

    def _turn(self, candidate: _Candidate, context: int) -> None:
        """One prompt and its steps; the cache is gone afterwards, for both do not fit at once."""
        settings = self.settings
        ids = prompt_ids(self.model, candidate.run_batch, context)
        runner = candidate.spec.runner(self.model, settings.prefill_chunk, settings.compiled)
        runner.prepare(context)
        clock = Clock(self.model.device)
        candidate.prefill.append(clock.seconds(lambda: runner.prefill(ids)))
        with static_shapes():
            candidate.decode.append(time_steps(runner, ids[:, :1], settings))
        runner.release()

    def _row(self, candidate: _Candidate, full: _Candidate, context: int) -> MaxBatchRow:
        memory, settings, batch = candidate.memory, self.settings, candidate.run_batch
        peak = candidate.peaks.get(batch)
        measured: dict[str, Any] = {}
        if candidate.decode:
            decode = Spread.of(candidate.decode)
            measured = {
                "prefill": Spread.of(candidate.prefill),
                "decode": decode,
                "tokens_per_second": batch / decode.median,
            }
        if candidate.decode and full.decode:
            speeds, full_speeds = ([c.run_batch / s for s in c.decode] for c in (candidate, full))
            measured["throughput_ratio"] = Spread.of_ratios(speeds, full_speeds)
        return MaxBatchRow(
            model=self.source.name,
            dtype=dtype_name(self.model.dtype),
            positions=settings.positions,
            context=context,
            budget=candidate.spec.budget,
            cache=candidate.spec.name,
            kv_bits=candidate.spec.kv_bits,
            rounds=settings.rounds,
            steps=settings.steps,
            prefill_chunk=settings.prefill_chunk,
            compiled=settings.compiled and candidate.spec.name == "h2o",
            memory_bytes=self.memory,
            weight_bytes=memory.weights,
            runtime_bytes=memory.runtime,
            constant_bytes=memory.constant,
            cache_bytes=memory.cache,
            activation_bytes=memory.activation,
            max_batch=candidate.max_batch,
            is_verified=candidate.is_verified,
            peak_bytes=None if peak is None else peak.peak,
            run_batch=batch,
            **measured,
        )
