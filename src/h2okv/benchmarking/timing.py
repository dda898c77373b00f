"""Interleaved rounds, medians and spread."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from h2okv.benchmarking.caches import (
    COMPILED,
    CacheChoice,
    Contestant,
    Settings,
    contestant_class,
    one_line,
    static_shapes,
)
from h2okv.benchmarking.memory import Footprint, speedup_limit
from h2okv.benchmarking.model import ModelSource
from h2okv.benchmarking.peak import Trial, TrialFailedError, measure_peak, prompt_ids

_T = TypeVar("_T")


@dataclass(frozen=True)
class Clock:
    """Measures calls on a device.

    Attributes:
        device: Where the work runs; a GPU works on after a call has returned.
    """

    device: torch.device

    def seconds(self, call: Callable[[], Any]) -> float:
        """Runs a call, and returns the seconds until its work is done."""
        self._synchronise()
        start = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def in_turn(items: Sequence[_T], rounds: int) -> Iterator[tuple[int, _T]]:
    """Gives all items in every round, so that a slow moment of the machine hits all of them.

    The order turns round after round: none always runs in another one's warm or cold cache.
    """
    for number in range(rounds):
        for item in items if number % 2 == 0 else list(reversed(items)):
            yield number, item


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles.

    Attributes:
        lower: The lower quartile.
        median: The median.
        upper: The upper quartile.
    """

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Takes the quartiles of samples, at least one."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
        """Takes the quartiles of the ratios within rounds; both are in order of the rounds."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True)
class Row:
    """What was measured of one cache in one combination; ``None`` where nothing was.

    Times are in seconds, sizes in bytes; ``_lower`` and ``_upper`` are quartiles. Ratios are
    medians of the ratios within a round.

    Attributes:
        model: Name of the model.
        dtype: Of weights and cache.
        positions: How H2O places its entries.
        context: Tokens of each prompt.
        batch: Sequences.
        budget: Tokens or a fraction of the prompt; ``None`` for a cache that holds everything.
        cache: Which cache.
        kv_bits: Bits of a number of H2O's keys and values; ``None`` for the dtype.
        status: ``"ok"``, or why there is no figure.
        rounds: In each of which every cache took its turn.
        steps: Decode steps of one sample.
        prefill_chunk: Tokens of a block of the prompt.
        compiled: Whether its steps ran through ``torch.compile``.
        entries: Held by one KV head after the prompt.
        cache_bytes: Held by the cache after the last step.
        weight_bytes: ``W``, the weights that a step reads.
        prefill: Reading the prompt.
        decode: One decode step.
        tokens_per_second: Of the whole batch while decoding, by the median.
        peak_bytes: Largest memory of the process, or allocated on the GPU.
        prefill_ratio: This prefill over that of the full cache.
        speedup: The full cache's decode step over this one.
        limit: What that speed-up could be at most; see `h2okv.benchmarking.memory`.
        share: ``speedup / limit``.
        step_bytes: What a step must read: weights, and the cache.
        achieved: ``step_bytes`` over the median step, in bytes for each second.
        bandwidth: What this machine can read, measured in the same run.
    """

    model: str
    dtype: str
    positions: str
    context: int
    batch: int
    budget: int | float | None
    cache: str
    kv_bits: int | None
    status: str
    rounds: int
    steps: int
    prefill_chunk: int | None
    compiled: bool
    entries: int | None = None
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    prefill: Spread | None = None
    decode: Spread | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    prefill_ratio: Spread | None = None
    speedup: Spread | None = None
    limit: float | None = None
    share: float | None = None
    step_bytes: int | None = None
    achieved: float | None = None
    bandwidth: float | None = None

    def cells(self) -> dict[str, Any]:
        """The row as plain columns, a spread as three."""
        return flat(self, _SPREADS)


def flat(row: Any, spreads: tuple[str, ...]) -> dict[str, Any]:
    """Turns a row into plain columns."""
    cells: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name in spreads:
            value = value or {}
            cells[name] = value.get("median")
            cells[f"{name}_lower"] = value.get("lower")
            cells[f"{name}_upper"] = value.get("upper")
        else:
            cells[name] = value
    return cells


def flat_names(kind: Any, spreads: tuple[str, ...]) -> tuple[str, ...]:
    """The names that `flat` gives for rows of a dataclass."""
    names: list[str] = []
    for column in fields(kind):
        names.append(column.name)
        if column.name in spreads:
            names += [f"{column.name}_lower", f"{column.name}_upper"]
    return tuple(names)


_SPREADS = ("prefill", "decode", "prefill_ratio", "speedup")
COLUMNS = flat_names(Row, _SPREADS)
"""The columns of a row, in order."""


Report = Callable[[str], None]
"""Hears what was done; called once for each unit of `count_units`."""

_OWN = ("dynamic", "static", "h2o")
_FULL = "dynamic"


@dataclass
class Samples:
    """What one contestant's turns gave.

    Attributes:
        prefill: Seconds of each prompt.
        decode: Seconds of one step, the mean of a turn.
        cache_bytes: Held after the last step.
        failure: What went wrong in another package; empty if nothing did.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Comparison:
    """Measures a model of one dtype, its checks passed.

    Attributes:
        model: The model; its attention implementation is mutated.
        source: How another process builds it.
        footprint: Its bytes.
        settings: What to measure.
        bandwidth: Of this machine, in bytes for each second.
        report: Hears of the progress.
    """

    model: PreTrainedModel
    source: ModelSource
    footprint: Footprint
    settings: Settings
    bandwidth: float
    report: Report

    def rows(self) -> Iterator[Row]:
        """Measures all combinations; a combination's rows come when it is done."""
        for context in self.settings.contexts:
            for batch in self.settings.batches:
                yield from self._combination(context, batch)

    def _combination(self, context: int, batch: int) -> Iterator[Row]:
        choices = self.settings.choices()
        obstacles = {choice: contestant_class(choice).obstacle() for choice in choices}
        able = [choice for choice in choices if obstacles[choice] is None]
        chunk = self.settings.prefill_chunk
        compiled = self.settings.compiled
        contestants = [contestant_class(c)(self.model, c, chunk, compiled) for c in able]
        if compiled:
            torch.compiler.reset()  # what was compiled for other shapes
        with static_shapes():
            samples = self._time(contestants, context, batch)
        for contestant in contestants:
            contestant.forget()
        gc.collect()
        for choice in choices:
            if obstacles[choice] is not None:
                yield self._row(choice, context, batch, status=obstacles[choice])
            elif samples[choice].failure:
                yield self._row(choice, context, batch, status=samples[choice].failure)
            else:
                peak = self._peak(choice, context, batch)
                yield self._measured(choice, context, batch, samples, peak)

    def _time(
        self, contestants: list[Contestant], context: int, batch: int
    ) -> dict[CacheChoice, Samples]:
        """Times prompts, then steps on the caches of the last prompts."""
        ids = prompt_ids(self.model, batch, context)
        samples = {contestant.choice: Samples() for contestant in contestants}
        for contestant in contestants:
            # The first forward of a kind finds algorithms and scratch memory; it does not count.
            self._guard(self._warm_up, contestant, ids, samples)
        for _, contestant in in_turn(contestants, self.settings.rounds):
            self._guard(self._read, contestant, ids, samples)
            self.report(f"{context} x {batch}: prompt, {contestant.choice.label}")
        for _, contestant in in_turn(contestants, self.settings.rounds):
            self._guard(self._step, contestant, ids, samples)
            self.report(f"{context} x {batch}: decode, {contestant.choice.label}")
        return samples

    def _guard(
        self,
        turn: Callable[[Contestant, torch.Tensor, Samples], None],
        contestant: Contestant,
        ids: torch.Tensor,
        samples: dict[CacheChoice, Samples],
    ) -> None:
        """Runs a turn; what fails in another package's cache ends that cache alone."""
        own = samples[contestant.choice]
        if own.failure:
            return
        try:
            turn(contestant, ids, own)
        except Exception as error:
            if contestant.choice.name in _OWN:
                raise
            own.failure = f"failed: {one_line(error)}"
            contestant.forget()

    def _warm_up(self, contestant: Contestant, ids: torch.Tensor, _: Samples) -> None:
        short = ids[:, : min(64, ids.shape[1])]
        contestant.prepare(short.shape[1])
        contestant.read(short)
        if not self.settings.compiled:  # a compiled step would be one for this short prompt
            with contestant.stepping():
                contestant.step(ids[:, :1])
        contestant.forget()

    def _read(self, contestant: Contestant, ids: torch.Tensor, samples: Samples) -> None:
        contestant.prepare(ids.shape[1])
        seconds = Clock(self.model.device).seconds(lambda: contestant.read(ids))
        if contestant.reads_prompt:
            samples.prefill.append(seconds)

    def _step(self, contestant: Contestant, ids: torch.Tensor, samples: Samples) -> None:
        token = ids[:, :1]

        def turn() -> None:
            for _ in range(self.settings.steps):
                contestant.step(token)

        with contestant.stepping():
            for _ in range(self.settings.uncounted_steps):
                contestant.step(token)
            samples.decode.append(Clock(self.model.device).seconds(turn) / self.settings.steps)
        samples.cache_bytes = contestant.nbytes

    def _peak(self, choice: CacheChoice, context: int, batch: int) -> int | None:
        if not self.settings.peak or not contestant_class(choice).reads_prompt:
            return None
        trial = Trial(
            self.source, _name(self.model.dtype), str(self.model.device), torch.get_num_threads(),
            choice, context, batch, prefill_chunk=self.settings.prefill_chunk,
        )  # fmt: skip
        try:
            peak = measure_peak(trial, self.model)
        except TrialFailedError:
            peak = None  # an empty cell; the times stand
        self.report(f"{context} x {batch}: memory, {choice.label}")
        return None if peak is None else peak.peak

    def _measured(
        self,
        choice: CacheChoice,
        context: int,
        batch: int,
        samples: dict[CacheChoice, Samples],
        peak: int | None,
    ) -> Row:
        own = samples[choice]
        decode = Spread.of(own.decode)
        read = self._own_bytes(choice, context, batch, own)
        weights = self.footprint.step_weight_bytes
        values: dict[str, Any] = {
            "entries": choice.entries(context),
            "cache_bytes": own.cache_bytes,
            "prefill": Spread.of(own.prefill) if own.prefill else None,
            "decode": decode,
            "tokens_per_second": batch / decode.median,
            "peak_bytes": peak,
            "limit": speedup_limit(weights, self.footprint.full_bytes(batch, context), read),
            "step_bytes": weights + read,
            "achieved": (weights + read) / decode.median,
        }
        full = samples.get(CacheChoice(_FULL))
        if full is not None:
            values["speedup"] = Spread.of_ratios(full.decode, own.decode)
            values["share"] = values["speedup"].median / values["limit"]
            if own.prefill:
                values["prefill_ratio"] = Spread.of_ratios(own.prefill, full.prefill)
        return self._row(choice, context, batch, **values)

    def _own_bytes(self, choice: CacheChoice, context: int, batch: int, samples: Samples) -> int:
        """Bytes of its cache that a step must read."""
        if choice.name == "quantized":
            return samples.cache_bytes  # how it packs is its own affair
        entries = choice.entries(context)
        if choice.name == "h2o":
            return self.footprint.h2o_bytes(batch, entries, context, choice.kv_bits)
        return self.footprint.full_bytes(batch, entries)

    def _row(self, choice: CacheChoice, context: int, batch: int, **values: Any) -> Row:
        common: dict[str, Any] = {
            "model": self.source.name,
            "dtype": _name(self.model.dtype),
            "positions": self.settings.positions,
            "context": context,
            "batch": batch,
            "budget": choice.budget,
            "cache": choice.name,
            "kv_bits": choice.kv_bits,
            "status": "ok",
            "rounds": self.settings.rounds,
            "steps": self.settings.steps,
            "prefill_chunk": self.settings.prefill_chunk,
            "compiled": self.settings.compiled and choice.name in COMPILED,
            "weight_bytes": self.footprint.step_weight_bytes,
            "bandwidth": self.bandwidth,
        }
        return Row(**(common | values))


def count_units(settings: Settings) -> int:
    """How often a comparison of one dtype reports."""
    able = [c for c in settings.choices() if contestant_class(c).obstacle() is None]
    peaks = sum(contestant_class(c).reads_prompt for c in able) if settings.peak else 0
    combinations = len(settings.contexts) * len(settings.batches)
    return combinations * (2 * settings.rounds * len(able) + peaks)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
