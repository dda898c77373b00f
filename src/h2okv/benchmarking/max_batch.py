"""The largest batch that a memory holds, full cache against H2O, and how fast it is there.

Throughput by larger batches is the way in which the paper (arXiv 2306.14048, section 5.2) turns a
smaller cache into speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.benchmarking.caches import CacheChoice, Settings, contestant_class, static_shapes
from h2okv.benchmarking.memory import Demand, Footprint, cache_bytes
from h2okv.benchmarking.model import ModelSource
from h2okv.benchmarking.peak import Peak, Trial, TrialFailedError, measure_peak, prompt_ids
from h2okv.benchmarking.timing import Clock, Spread, flat, flat_names, in_turn
from h2okv.engine.memory import available_bytes

_MOST_CORRECTIONS = 3


@dataclass(frozen=True)
class MaxBatchRow:
    """What was found for one cache, budget, context and dtype.

    Attributes:
        model: Name of the model.
        dtype: Of weights and cache.
        positions: How H2O places its entries.
        context: Tokens of each prompt.
        budget: Tokens or a fraction of the prompt; ``None`` for the full cache.
        cache: ``"dynamic"`` or ``"h2o"``.
        kv_bits: Bits of a number of H2O's keys and values; ``None`` for the dtype.
        rounds: In each of which both caches took their turn.
        steps: Decode steps of one turn.
        prefill_chunk: Tokens of a block of the prompt.
        compiled: Whether the steps on H2O ran through ``torch.compile``.
        memory_bytes: Given for everything.
        weight_bytes: All weights.
        runtime_bytes: Held beside the weights before anything is read.
        constant_bytes: Needed by a forward of any batch.
        cache_bytes: Of one sequence.
        activation_bytes: Of one sequence beside its cache.
        max_batch: The largest batch that fits.
        is_verified: Whether that batch was run and stayed within the memory.
        peak_bytes: Measured at ``run_batch``.
        run_batch: The batch that was run; 0 if none.
        prefill: Seconds of the whole batch's prompt.
        decode: Seconds of one step.
        tokens_per_second: New tokens of the whole batch while decoding.
        throughput_ratio: H2O's over the full cache's, each at its ``run_batch``; medians and
            quartiles of the ratios within a round.
    """

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

    def cells(self) -> dict[str, Any]:
        """The row as plain columns, a spread as three."""
        return flat(self, _SPREADS)


_SPREADS = ("prefill", "decode", "throughput_ratio")
MAX_BATCH_COLUMNS = flat_names(MaxBatchRow, _SPREADS)
"""The columns of a row, in order."""


@dataclass
class _Candidate:
    """One cache, how large a batch it may have, and its samples."""

    choice: CacheChoice
    demand: Demand
    max_batch: int
    run_batch: int
    peaks: dict[int, Peak]
    is_verified: bool
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class MaxBatch:
    """Finds the largest batches for a model of one dtype, its checks passed.

    Attributes:
        model: The model; its attention implementation is mutated.
        source: How another process builds it.
        footprint: Its bytes.
        settings: Contexts, budgets, rounds and steps; batches and caches are not read.
        memory: Bytes given for weights, caches and everything else.
        max_run_batch: The largest batch that is really run.
        report: Hears of the progress.
    """

    model: PreTrainedModel
    source: ModelSource
    footprint: Footprint
    settings: Settings
    memory: int
    max_run_batch: int
    report: Callable[[str], None]

    def rows(self) -> Iterator[MaxBatchRow]:
        """Measures all contexts; a context's rows come when it is done."""
        for context in self.settings.contexts:
            choices = [CacheChoice("dynamic")] + [
                CacheChoice("h2o", budget, self.settings.positions, bits)
                for budget in self.settings.budgets
                for bits in (None, *self.settings.kv_bits)
            ]
            candidates = [self._candidate(choice, context) for choice in choices]
            runnable = [candidate for candidate in candidates if candidate.run_batch]
            for _, candidate in in_turn(runnable, self.settings.rounds):
                self._turn(candidate, context)
                self.report(f"{context}: batch {candidate.run_batch}, {candidate.choice.label}")
            for candidate in candidates:
                yield self._row(candidate, candidates[0], context)

    def _candidate(self, choice: CacheChoice, context: int) -> _Candidate:
        """Finds the largest batch by arithmetic, and corrects it by running it."""
        cache = cache_bytes(choice, self.footprint, 1, context)
        weights = self.footprint.weight_bytes
        peaks = {batch: self._peak(choice, context, batch) for batch in (1, 2)}
        demand = Demand.of_peaks(weights, cache, peaks)
        largest = demand.largest_batch(self.memory)
        for _ in range(_MOST_CORRECTIONS):
            if largest in peaks or not self._is_runnable(demand, largest):
                break
            try:
                peaks[largest] = self._peak(choice, context, largest)
            except TrialFailedError:
                break
            # One and two sequences make a short line; a longer one foretells better.
            demand = Demand.of_peaks(weights, cache, peaks)
            largest = self._between_measured(demand.largest_batch(self.memory), peaks)
        else:
            # The line and the measurements do not meet: the largest that did fit.
            largest = max((b for b, p in peaks.items() if p.peak <= self.memory), default=0)
        verified = largest in peaks and peaks[largest].peak <= self.memory
        run = min(largest, self.max_run_batch)
        while run and not self._has_room(demand, run):
            run //= 2
        return _Candidate(choice, demand, largest, run, peaks, verified)

    def _between_measured(self, batch: int, peaks: dict[int, Peak]) -> int:
        """Moves a foretold batch to where the measurements leave it."""
        fitting = [b for b, peak in peaks.items() if peak.peak <= self.memory]
        failing = [b for b, peak in peaks.items() if peak.peak > self.memory]
        return min([max([batch, *fitting]), *(b - 1 for b in failing)])

    def _is_runnable(self, demand: Demand, batch: int) -> bool:
        return 0 < batch <= self.max_run_batch and self._has_room(demand, batch)

    def _has_room(self, demand: Demand, batch: int) -> bool:
        """Whether this machine, the model loaded here too, can run a batch."""
        available = available_bytes(self.model.device)
        own = demand.weights if self.model.device.type == "cpu" else 0
        needed = demand.bytes(batch) - demand.weights + own
        return available is None or needed <= available

    def _peak(self, choice: CacheChoice, context: int, batch: int) -> Peak:
        trial = Trial(
            self.source, str(self.model.dtype).removeprefix("torch."), str(self.model.device),
            torch.get_num_threads(), choice, context, batch,
            prefill_chunk=self.settings.prefill_chunk,
        )  # fmt: skip
        peak = measure_peak(trial, self.model)
        self.report(f"{context}: memory of batch {batch}, {choice.label}")
        if peak is None:
            raise ValueError(
                "this system does not tell a process's memory, which --max-batch needs; use Linux,"
                " or a GPU"
            )
        return peak

    def _turn(self, candidate: _Candidate, context: int) -> None:
        """One prompt and its steps; the cache is gone afterwards, for both do not fit at once."""
        ids = prompt_ids(self.model, candidate.run_batch, context)
        kind = contestant_class(candidate.choice)
        settings = self.settings
        contestant = kind(
            self.model, candidate.choice, settings.prefill_chunk, compiled=settings.compiled
        )
        clock = Clock(self.model.device)
        contestant.prepare(context)
        candidate.prefill.append(clock.seconds(lambda: contestant.read(ids)))

        def steps() -> None:
            for _ in range(settings.steps):
                contestant.step(ids[:, :1])

        with contestant.stepping(), static_shapes():
            for _ in range(settings.uncounted_steps):
                contestant.step(ids[:, :1])
            candidate.decode.append(clock.seconds(steps) / settings.steps)
        contestant.forget()

    def _row(self, candidate: _Candidate, full: _Candidate, context: int) -> MaxBatchRow:
        demand, settings, batch = candidate.demand, self.settings, candidate.run_batch
        peak = candidate.peaks.get(batch)
        row = MaxBatchRow(
            model=self.source.name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            positions=settings.positions,
            context=context,
            budget=candidate.choice.budget,
            cache=candidate.choice.name,
            kv_bits=candidate.choice.kv_bits,
            rounds=settings.rounds,
            steps=settings.steps,
            prefill_chunk=settings.prefill_chunk,
            compiled=settings.compiled and candidate.choice.name == "h2o",
            memory_bytes=self.memory,
            weight_bytes=demand.weights,
            runtime_bytes=demand.runtime,
            constant_bytes=demand.constant,
            cache_bytes=demand.cache,
            activation_bytes=demand.activation,
            max_batch=candidate.max_batch,
            is_verified=candidate.is_verified,
            peak_bytes=None if peak is None else peak.peak,
            run_batch=batch,
        )
        if not candidate.decode:
            return row
        decode = Spread.of(candidate.decode)
        ratio = None
        if full.decode:
            speeds, full_speeds = ([c.run_batch / s for s in c.decode] for c in (candidate, full))
            ratio = Spread.of_ratios(speeds, full_speeds)
        return replace(
            row,
            prefill=Spread.of(candidate.prefill),
            decode=decode,
            tokens_per_second=batch / decode.median,
            throughput_ratio=ratio,
        )
