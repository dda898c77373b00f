"""Prefill, decode step and memory of several caches, measured in turn on the same prompts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.benchmarking.caches import RUNNERS, CacheRunner, CacheSpec, one_line
from h2okv.benchmarking.memory import Footprint, speedup_limit
from h2okv.benchmarking.model import ModelSource
from h2okv.benchmarking.peak import (
    PeakRun,
    PeakRunFailedError,
    dtype_name,
    measure_peak,
    prompt_ids,
)
from h2okv.benchmarking.timing import ResultRow, Spread, interleaved
from h2okv.cache.validation import check_kv_bits
from h2okv.config import Positions
from h2okv.offload.profile import Clock

_OWN = ("dynamic", "static", "h2o")
"""A failure of these ends the run; one in another package's cache ends that cache alone."""


@dataclass(frozen=True)
class Settings:
    """The combinations to measure, and how.

    Attributes:
        contexts: Lengths of the prompts, in tokens.
        batches: Numbers of sequences.
        budgets: Tokens or fractions of the prompt.
        caches: Names of `RUNNERS`.
        dtypes: Of weights and caches.
        positions: How H2O places its entries.
        rounds: In each, every cache takes its turn.
        steps: Decode steps of one turn; their mean is one sample.
        prefill_chunk: Tokens of a block of the prompt; ``None`` reads it at once.
        peak: Whether to measure peak memory, in processes of its own.
        compiled: Whether decode steps of `static` and `h2o` run through ``torch.compile``.
        kv_bits: `h2o` runs once more for each of these, with keys and values in so many bits.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    budgets: tuple[int | float, ...]
    caches: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    positions: Positions = "original"
    rounds: int = 5
    steps: int = 8
    prefill_chunk: int | None = None
    peak: bool = True
    compiled: bool = False
    kv_bits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "prefill_chunk"):
            _check_least(name, getattr(self, name), 1)
        for context in self.contexts:
            _check_least("contexts", context, 8)
        for batch in self.batches:
            _check_least("batches", batch, 1)
        for name in ("contexts", "batches", "budgets", "caches", "dtypes", "kv_bits"):
            values = getattr(self, name)
            option = {"budgets": "budget", "dtypes": "dtype"}.get(name, name).replace("_", "-")
            if not values and name != "kv_bits":
                raise ValueError(f"--{option} names nothing; give at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"--{option} names a value twice; give each once")
        for bits in self.kv_bits:
            check_kv_bits(bits)
        for name in self.caches:
            if name not in RUNNERS:
                raise ValueError(
                    f"--caches: {name!r} is not known; choose from {', '.join(RUNNERS)}"
                )
        if self.kv_bits and "h2o" not in self.caches:
            raise ValueError("--kv-bits is about h2o; name it among the --caches, or leave it out")
        for budget in self.budgets:
            if isinstance(budget, float) and not 0 < budget <= 1:
                raise ValueError(
                    f"--budget {budget:g} is out of range; give a fraction above 0 and up to 1,"
                    " or tokens"
                )
            if isinstance(budget, int):
                _check_least("budget", budget, 2)
        if self.positions not in ("original", "rolling"):
            raise ValueError(
                f"--positions {self.positions!r} cannot be measured; choose original or rolling"
            )

    def specs(self) -> list[CacheSpec]:
        """All caches that take turns on one prompt, those that hold everything first."""
        whole = [CacheSpec(name) for name in self.caches if not RUNNERS[name].has_budget]
        return whole + [
            CacheSpec.of(name, budget, positions=self.positions, kv_bits=bits)
            for budget in self.budgets
            for name in self.caches
            if RUNNERS[name].has_budget
            for bits in ((None, *self.kv_bits) if name == "h2o" else (None,))
        ]

    @property
    def uncounted_steps(self) -> int:
        """Steps at the beginning of a turn that are not timed; compiling takes several."""
        return 4 if self.compiled else 1

    def check_window(self, window: int | None) -> None:
        """Refuses contexts that the model cannot read with all steps after them."""
        context = max(self.contexts)
        steps = self.rounds * (self.uncounted_steps + self.steps)
        if window is not None and context + steps > window:
            raise ValueError(
                f"--contexts {context} and {steps} decode steps are above the model's context"
                f" window of {window} tokens; give a shorter context, or"
                " random weights with another one, such as --shape llama-3-8b,window=65536"
            )

    def needed_bytes(
        self, footprint: Footprint, batch: int, context: int, second_process: bool
    ) -> int:
        """A lower bound for one combination: weights, all its caches, one block of the prompt."""
        # Quantised baselines are smaller than this by an amount that depends on their packing.
        whole = [spec for spec in self.specs() if spec.name != "quantized"]
        sizes = [footprint.cache_bytes(spec, batch, context) for spec in whole]
        reading = footprint.prefill_bytes(batch, min(context, self.prefill_chunk or context))
        if "kvpress" in self.caches:
            # Eager attention makes the T x T matrix of a layer, in fp32 at that.
            reading = max(reading, batch * footprint.num_heads * context**2 * 4)
        together = footprint.weight_bytes + sum(sizes) + reading
        if not (self.peak and second_process):
            return together
        return max(together, 2 * footprint.weight_bytes + max(sizes, default=0) + reading)

    def check_fits(
        self, footprint: Footprint, available: int | None, second_process: bool = False
    ) -> None:
        """Refuses what cannot fit, before anything is allocated."""
        for context in self.contexts:
            for batch in self.batches:
                needed = self.needed_bytes(footprint, batch, context, second_process)
                if available is not None and needed > available:
                    raise ValueError(
                        f"--contexts {context} with --batches {batch} needs at least {needed} bytes"
                        f" ({needed / 2**30:.1f} GiB: weights, caches and one block of the prompt),"
                        f" and {available} bytes ({available / 2**30:.1f} GiB) are available; give"
                        " fewer --layers, a smaller batch or context, or fewer --caches"
                    )


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        option = name.replace("_", "-")
        raise ValueError(f"--{option} {value} is too few; give {least} or more")


@dataclass(frozen=True)
class Row(ResultRow):
    """What was measured of one cache in one combination; ``None`` where nothing was.

    Times are in seconds, sizes in bytes; ratios are within a round. docs/benchmarking.md says what
    each column is.
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


@dataclass
class _Samples:
    """Seconds of each prompt and of one step, bytes after the last step, and what went wrong."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Comparison:
    """Measures a model of one dtype, its checks passed; the model's attention is mutated.

    `source` tells another process how to build it, `bandwidth` is this machine's in bytes a second,
    and `report` hears of each of `count_units`.
    """

    model: PreTrainedModel
    source: ModelSource
    footprint: Footprint
    settings: Settings
    bandwidth: float
    report: Callable[[str], None]

    def rows(self) -> Iterator[Row]:
        """Measures all combinations; a combination's rows come when it is done."""
        for context in self.settings.contexts:
            for batch in self.settings.batches:
                yield from self._combination(context, batch)

    def _combination(self, context: int, batch: int) -> Iterator[Row]:
        settings = self.settings
        specs = settings.specs()
        obstacles = {spec: RUNNERS[spec.name].obstacle() for spec in specs}
        runners = [
            spec.runner(self.model, settings.prefill_chunk, settings.compiled)
            for spec in specs
            if obstacles[spec] is None
        ]
        if settings.compiled:
            torch.compiler.reset()  # what was compiled for other shapes
        with static_shapes():
            samples = self._time(runners, context, batch)
        for runner in runners:
            runner.release()
        gc.collect()
        for spec in specs:
            status = obstacles[spec] or samples[spec].failure
            values = {"status": status} if status else self._values(spec, context, batch, samples)
            yield self._row(spec, context, batch, values)

    def _time(
        self, runners: list[CacheRunner], context: int, batch: int
    ) -> dict[CacheSpec, _Samples]:
        """Times prompts, then steps on the caches of the last prompts."""
        ids = prompt_ids(self.model, batch, context)
        samples = {runner.spec: _Samples() for runner in runners}
        for runner in runners:
            # The first forward of a kind finds algorithms and scratch memory; it does not count.
            self._guard(self._warm_up, runner, ids, samples[runner.spec])
        for turn, name in ((self._prefill, "prompt"), (self._decode, "decode")):
            for _, runner in interleaved(runners, self.settings.rounds):
                self._guard(turn, runner, ids, samples[runner.spec])
                self.report(f"{context} x {batch}: {name}, {runner.spec.label}")
        return samples

    def _guard(
        self,
        turn: Callable[[CacheRunner, torch.Tensor, _Samples], None],
        runner: CacheRunner,
        ids: torch.Tensor,
        samples: _Samples,
    ) -> None:
        """Runs a turn; what fails in another package's cache ends that cache alone."""
        if samples.failure:
            return
        try:
            turn(runner, ids, samples)
        except Exception as error:
            if runner.spec.name in _OWN:
                raise
            samples.failure = f"failed: {one_line(error)}"
            runner.release()

    def _warm_up(self, runner: CacheRunner, ids: torch.Tensor, _: _Samples) -> None:
        short = ids[:, : min(64, ids.shape[1])]
        runner.prepare(short.shape[1])
        runner.prefill(short)
        if not self.settings.compiled:  # a compiled step would be one for this short prompt
            with runner.decoding():
                runner.step(ids[:, :1])
        runner.release()

    def _prefill(self, runner: CacheRunner, ids: torch.Tensor, samples: _Samples) -> None:
        runner.prepare(ids.shape[1])
        seconds = Clock(self.model.device).seconds(lambda: runner.prefill(ids))
        if runner.reads_prompt:
            samples.prefill.append(seconds)

    def _decode(self, runner: CacheRunner, ids: torch.Tensor, samples: _Samples) -> None:
        samples.decode.append(time_steps(runner, ids[:, :1], self.settings))
        samples.cache_bytes = runner.nbytes

    def _peak(self, spec: CacheSpec, context: int, batch: int) -> int | None:
        if not self.settings.peak or not RUNNERS[spec.name].reads_prompt:
            return None
        chunk = self.settings.prefill_chunk
        run = PeakRun.on(self.model, self.source, spec, context, batch, chunk)
        try:
            peak = measure_peak(run, self.model)
        except PeakRunFailedError:
            peak = None  # an empty cell; the times stand
        self.report(f"{context} x {batch}: memory, {spec.label}")
        return None if peak is None else peak.peak

    def _values(
        self, spec: CacheSpec, context: int, batch: int, samples: dict[CacheSpec, _Samples]
    ) -> dict[str, Any]:
        own = samples[spec]
        decode = Spread.of(own.decode)
        read = self._read_bytes(spec, context, batch, own)
        weights = self.footprint.step_weight_bytes
        limit = speedup_limit(weights, self.footprint.full_bytes(batch, context), read)
        values: dict[str, Any] = {
            "entries": spec.entries(context),
            "cache_bytes": own.cache_bytes,
            "prefill": Spread.of(own.prefill) if own.prefill else None,
            "decode": decode,
            "tokens_per_second": batch / decode.median,
            "peak_bytes": self._peak(spec, context, batch),
            "limit": limit,
            "step_bytes": weights + read,
            "achieved": (weights + read) / decode.median,
        }
        full = samples.get(CacheSpec("dynamic"))
        if full is not None:
            speedup = Spread.of_ratios(full.decode, own.decode)
            values |= {"speedup": speedup, "share": speedup.median / limit}
            if own.prefill:
                values["prefill_ratio"] = Spread.of_ratios(own.prefill, full.prefill)
        return values

    def _read_bytes(self, spec: CacheSpec, context: int, batch: int, samples: _Samples) -> int:
        """Bytes of its cache that a step must read."""
        if spec.name == "quantized":
            return samples.cache_bytes  # how it packs is its own affair
        entries = spec.entries(context)
        if spec.name == "h2o":
            return self.footprint.h2o_bytes(batch, entries, context, spec.kv_bits)
        return self.footprint.full_bytes(batch, entries)

    def _row(self, spec: CacheSpec, context: int, batch: int, values: dict[str, Any]) -> Row:
        settings = self.settings
        common: dict[str, Any] = {
            "model": self.source.name,
            "dtype": dtype_name(self.model.dtype),
            "positions": settings.positions,
            "context": context,
            "batch": batch,
            "budget": spec.budget,
            "cache": spec.name,
            "kv_bits": spec.kv_bits,
            "status": "ok",
            "rounds": settings.rounds,
            "steps": settings.steps,
            "prefill_chunk": settings.prefill_chunk,
            "compiled": settings.compiled and RUNNERS[spec.name].can_compile,
            "weight_bytes": self.footprint.step_weight_bytes,
            "bandwidth": self.bandwidth,
        }
        return Row(**(common | values))


def time_steps(runner: CacheRunner, token: torch.Tensor, settings: Settings) -> float:
    """Seconds of one decode step: the mean of one turn."""

    def turn() -> None:
        for _ in range(settings.steps):
            runner.step(token)

    with runner.decoding():
        for _ in range(settings.uncounted_steps):
            runner.step(token)
        return Clock(token.device).seconds(turn) / settings.steps


def static_shapes() -> AbstractContextManager[Any]:
    """Compiles every new size for itself, as the first one in a process is, not for any size."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


def count_units(settings: Settings) -> int:
    """How often a comparison of one dtype reports."""
    able = [spec for spec in settings.specs() if RUNNERS[spec.name].obstacle() is None]
    peaks = sum(RUNNERS[spec.name].reads_prompt for spec in able) if settings.peak else 0
    combinations = len(settings.contexts) * len(settings.batches)
    return combinations * (2 * settings.rounds * len(able) + peaks)
