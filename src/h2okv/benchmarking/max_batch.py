"""The largest batch that a memory holds, full cache against H2O, and how fast it is there.

Throughput by larger batches is the way in which the paper (arXiv 2306.14048, section 5.2) turns a
smaller cache into speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from h2okv.benchmarking.caches import CacheSpec, Peak, PeakRunFailedError, prompt_ids
from h2okv.benchmarking.comparison import Bench, Settings, static_shapes
from h2okv.benchmarking.results import interleaved, quartiles, ratios, triple
from h2okv.engine.memory import available_bytes
from h2okv.offload.profile import Clock
from h2okv.records import Row

_MOST_CORRECTIONS = 3


@dataclass(frozen=True)
class BatchMemory:
    """Memory by batch: ``weight + runtime + constant + batch * (cache + activation)``, in bytes.

    Weights and the cache of one sequence are known by arithmetic; what the process or the device
    holds beside the weights (runtime), and what a forward needs for any batch (constant) and for
    each sequence (activation), is measured.
    """

    weight: int
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
        fixed = self.weight + self.runtime + self.constant
        return fixed + batch * (self.cache + self.activation)

    def largest_batch(self, memory: int) -> int:
        """The largest batch that fits; 0 if not even one sequence does."""
        return max(0, (memory - self.bytes(0)) // max(1, self.cache + self.activation))


COLUMNS = (
    "model", "dtype", "positions", "context", "budget", "cache", "kv_bits", "rounds", "steps",
    "prefill_chunk", "compiled", "memory_bytes", "weight_bytes", "runtime_bytes", "constant_bytes",
    "cache_bytes", "activation_bytes", "max_batch", "is_verified", "peak_bytes", "run_batch",
    *triple("prefill"), *triple("decode"), "tokens_per_second", *triple("throughput_ratio"),
)  # fmt: skip
"""What is told of one cache, budget, context and dtype; see docs/benchmarking.md."""


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
class MaxBatch(Bench):
    """Finds the largest batches in ``memory`` bytes for everything.

    Batches above ``max_run_batch`` are not really run. Of the settings, batches and caches are not
    read.
    """

    memory: int
    max_run_batch: int

    @staticmethod
    def specs(settings: Settings) -> list[CacheSpec]:
        """The caches that are compared: the full one first."""
        return replace(settings, caches=("dynamic", "h2o")).specs()

    @classmethod
    def count_units(cls, settings: Settings) -> int:
        """How often one dtype reports, about."""
        return len(settings.contexts) * len(cls.specs(settings)) * (3 + settings.rounds)

    def rows(self) -> Iterator[Row]:
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
        own = memory.weight if self.model.device.type == "cpu" else 0
        return available is None or memory.bytes(batch) - memory.weight + own <= available

    def _peak(self, spec: CacheSpec, context: int, batch: int) -> Peak:
        peak = self.peak(spec, context, batch)
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
            candidate.decode.append(self.time_steps(runner, ids[:, :1]))
        runner.release()

    def _row(self, candidate: _Candidate, full: _Candidate, context: int) -> Row:
        memory, batch = candidate.memory, candidate.run_batch
        peak = candidate.peaks.get(batch)
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | self.described(candidate.spec, context)
        row |= {f"{name}_bytes": value for name, value in asdict(memory).items()}
        row |= {
            "memory_bytes": self.memory,
            "max_batch": candidate.max_batch,
            "is_verified": candidate.is_verified,
            "peak_bytes": peak and peak.peak,
            "run_batch": batch,
            **quartiles("prefill", candidate.prefill),
            **quartiles("decode", candidate.decode),
        }
        if candidate.decode:
            row["tokens_per_second"] = batch / row["decode"]
        if candidate.decode and full.decode:
            speeds, full_speeds = ([c.run_batch / s for s in c.decode] for c in (candidate, full))
            row |= quartiles("throughput_ratio", ratios(speeds, full_speeds))
        return row
