"""Prefill, decode step and memory of several caches, and the largest batch that a memory holds."""

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
from transformers import DynamicCache, PreTrainedModel

import h2okv
from h2okv.benchmarking.caches import (
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
from h2okv.benchmarking.model import Footprint, ModelSource, speedup_limit
from h2okv.benchmarking.results import interleaved, quartiles, ratios, triple
from h2okv.cache.argument import CACHE
from h2okv.cache.layer import CacheLayer
from h2okv.cache.validation import context_window
from h2okv.config import CacheConfig, Positions
from h2okv.console import check_least
from h2okv.engine.memory import available_bytes
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.offload.profile import Clock
from h2okv.records import Row, unknown_name

_OWN = ("dynamic", "static", "h2o")
"""A failure of these ends the run; one in another package's cache ends that cache alone."""


@dataclass(frozen=True)
class Settings:
    """The combinations to measure, and how; the fields are options of `h2okv bench`."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    configs: tuple[CacheConfig, ...]
    caches: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    positions: Positions = "original"
    rounds: int = 5
    steps: int = 8  # of one turn, whose mean is one sample
    prefill_chunk: int | None = None
    peak: bool = True
    compiled: bool = False
    kv_bits: tuple[int, ...] = ()  # h2o runs once more for each

    def __post_init__(self) -> None:
        lists = {
            "contexts": self.contexts, "batches": self.batches, "budget": self.configs,
            "caches": self.caches, "dtype": self.dtypes, "kv-bits": self.kv_bits,
        }  # fmt: skip
        for option, values in lists.items():
            if not values and option != "kv-bits":
                raise ValueError(f"--{option} names nothing; give at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"--{option} names a value twice; give each once")
        check_least(rounds=self.rounds, steps=self.steps, prefill_chunk=self.prefill_chunk)
        check_least(8, contexts=min(self.contexts))
        check_least(batches=min(self.batches))
        if any(config.is_full for config in self.configs):
            raise ValueError("--budget full is no budget; --caches dynamic is the full cache")
        for name in self.caches:
            if name not in RUNNERS:
                raise unknown_name("--caches", name, RUNNERS)
        if self.kv_bits and "h2o" not in self.caches:
            raise ValueError("--kv-bits is about h2o; name it among the --caches, or leave it out")
        if self.positions not in ("original", "rolling"):
            raise ValueError(
                f"--positions {self.positions!r} cannot be measured; choose original or rolling"
            )

    def specs(self) -> list[CacheSpec]:
        """All caches that take turns on one prompt, those that hold everything first."""
        whole = [CacheSpec(name) for name in self.caches if not RUNNERS[name].has_budget]
        return whole + [
            CacheSpec(name, replace(config, positions=self.positions, kv_bits=bits))
            for config in self.configs
            for name in self.caches
            if RUNNERS[name].has_budget
            for bits in ((None, *self.kv_bits) if name == "h2o" else (None,))
        ]

    @property
    def uncounted_steps(self) -> int:
        """Steps at the beginning of a turn that are not timed; compiling takes several."""
        return 4 if self.compiled else 1

    def check_window(self, window: int | None) -> None:
        """Refuse contexts that the model cannot read with all steps after them."""
        context = max(self.contexts)
        steps = self.rounds * (self.uncounted_steps + self.steps)
        if window is not None and context + steps > window:
            raise ValueError(
                f"--contexts {context} and {steps} decode steps are above the model's context"
                f" window of {window} tokens; give a shorter context, or"
                " random weights with another one, such as --shape llama-3-8b,window=65536"
            )


_BATCH, _PROMPT, _STEPS = 2, 96, 8
# In fp32, and in half precision. Entries of nearly equal score may change places by rounding alone.
_LARGEST_ERROR = (1e-3, 5e-2)
_LARGEST_DIFFERENCE = (0.002, 0.02)


class CheckFailedError(Exception):
    """H2O does not compute what it must, so that its speed means nothing."""


def check_h2o(model: PreTrainedModel, **options: Any) -> dict[str, float | None]:
    """Hold H2O to full attention, with K >= length, and to its masking simulation.

    Returns the largest differences of logits, relative to the largest logit, and the fraction of
    the entries kept that masking does not keep. Half precision has no ``drop_error``, for two right
    results part by rounding, and counts the first layer alone, whose input is the same for both.
    """
    is_half = model.dtype != torch.float32
    ids = prompt_ids(model, _BATCH, _PROMPT + _STEPS)

    def logits(heavy: int | float, simulate: bool = False) -> tuple[torch.Tensor, h2okv.H2OCache]:
        cache = h2okv.H2OCache(model.config, heavy, heavy, simulate=simulate, **options)
        return _logits(model, ids, cache, ATTENTION_NAME), cache

    full = exact = _logits(model, ids, DynamicCache(config=model.config), "sdpa")
    if options.get("kv_bits") is not None:
        full, _ = logits(_PROMPT, simulate=True)
    whole, _ = logits(_PROMPT)
    dropped, dropping = logits(0.1)
    masked, masking = logits(0.1, simulate=True)
    largest = full.abs().max()
    error = float((whole - full).abs().max() / largest)
    drop_error = float((dropped - masked).abs().max() / largest)
    # The entries that one cache keeps and the other one does not, by layer and head.
    kept = differing = 0
    evicting = [n for n, layer in enumerate(dropping.layers) if isinstance(layer, CacheLayer)]
    for layer_idx in evicting[: 1 if is_half else None]:
        pair = (cache.kept_positions(layer_idx).flatten(0, 1) for cache in (dropping, masking))
        for own, other in zip(*pair, strict=True):
            held, wanted = (set(positions[positions >= 0].tolist()) for positions in (own, other))
            kept += len(wanted)
            differing += max(len(held - wanted), len(wanted - held))
    difference = differing / kept
    # A number that rounding moves to the next code moves by as much as packing moves numbers.
    packing = float((full - exact).abs().max() / largest)
    limit = max(_LARGEST_ERROR[is_half], packing)
    for what, found, largest_right in (
        ("with K >= length it differs from full attention", error, limit),
        ("it keeps other entries than its simulation", difference, _LARGEST_DIFFERENCE[is_half]),
        ("it differs from its simulation", 0.0 if is_half else drop_error, limit),
    ):
        # Not "found > largest_right", which NaN would pass.
        if not found <= largest_right:
            raise CheckFailedError(
                f"the check of H2O in {dtype_name(model.dtype)} failed: {what} by {found:.2g} (at"
                f" most {largest_right:.2g} is rounding), so no speed is reported"
            )
    return {
        "full_error": error,
        "drop_error": None if is_half else drop_error,
        "kept_difference": difference,
    }


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache | h2okv.H2OCache, attention: str
) -> torch.Tensor:
    """Logits after the prompt and after each step, fp32 ``[B, 1 + steps, V]``."""
    model.set_attn_implementation(attention)
    with torch.inference_mode():
        parts = (ids[:, :_PROMPT], *ids[:, _PROMPT:].split(1, dim=1))
        outputs = [model(part, logits_to_keep=1, **{CACHE: cache}).logits for part in parts]
    return torch.cat(outputs, dim=1).float()


COLUMNS = (
    "model", "dtype", "positions", "context", "batch", "budget", "cache", "kv_bits", "status",
    "rounds", "steps", "prefill_chunk", "compiled", "entries", "cache_bytes", "weight_bytes",
    *triple("prefill"), *triple("decode"), "tokens_per_second", "peak_bytes",
    *triple("prefill_ratio"), *triple("speedup"), "limit", "share", "step_bytes", "achieved",
    "bandwidth",
)  # fmt: skip
"""What is told of one cache in one combination; docs/benchmarking.md says what each column is."""


@dataclass
class Bench(ABC):
    """A model in one dtype and what is wanted of it; refused before anything is allocated."""

    source: ModelSource  # by which other processes build the model, too
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
        self.checks: dict[str, dict[str, float | None]] = {}
        self.bandwidth: float | None = None  # of the device's memory, in bytes a second
        self.check_fits(self.settings)

    def needed_bytes(self, settings: Settings, batch: int, context: int) -> int:
        """A lower bound for one combination: weights, all its caches, one block of the prompt."""
        footprint = self.footprint
        # Quantised baselines are smaller than this by an amount that depends on their packing.
        whole = [spec for spec in settings.specs() if spec.name != "quantized"]
        sizes = [footprint.cache_bytes(spec, batch, context) for spec in whole]
        weights = footprint.weight_bytes
        reading = footprint.prefill_bytes(batch, min(context, settings.prefill_chunk or context))
        # On a CPU peaks are measured in a process of its own, which has weights, too.
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
                    " fewer --layers, a smaller batch or context, or fewer --caches"
                )

    def rows(self, report: Callable[[int, str], None], bandwidth: float) -> Iterator[Row]:
        """Build the model, checks H2O on it, and only then measures; reports `num_units`."""
        self.report, self.bandwidth = partial(report, 1), bandwidth
        report(0, "building the model")
        self.model = self.source.build(self.dtype, self.device)
        report(0, "checking correctness")
        positions = self.settings.positions
        for bits in (None, *self.settings.kv_bits):
            name = dtype_name(self.dtype) + ("" if bits is None else f", {bits} bits")
            self.checks[name] = check_h2o(self.model, positions=positions, kv_bits=bits)
        yield from self.measured()
        del self.model  # its room is the next dtype's

    @property
    @abstractmethod
    def num_units(self) -> int:
        """How often it reports."""

    @abstractmethod
    def measured(self) -> Iterator[Row]:
        """Measure on the model that `rows` has checked."""

    def described(self, spec: CacheSpec, context: int) -> dict[str, Any]:
        """The columns that say what ran, and how."""
        settings = self.settings
        return {
            "model": self.source.name, "dtype": dtype_name(self.dtype),
            "positions": settings.positions, "context": context, "budget": spec.budget,
            "cache": spec.name, "kv_bits": spec.kv_bits, "rounds": settings.rounds,
            "steps": settings.steps, "prefill_chunk": settings.prefill_chunk,
            "compiled": settings.compiled and RUNNERS[spec.name].can_compile,
        }  # fmt: skip

    def peak(self, spec: CacheSpec, context: int, batch: int) -> Peak | None:
        run = PeakRun(
            self.source, self.dtype, self.device, torch.get_num_threads(), spec,
            context, batch, prefill_chunk=self.settings.prefill_chunk,
        )  # fmt: skip
        return measure_peak(run, self.model)

    def time_prompt(self, runner: CacheRunner, ids: torch.Tensor) -> float:
        """Seconds that reading a prompt takes."""
        runner.prepare(ids.shape[1])
        return Clock(ids.device).seconds(partial(runner.prefill, ids))

    def time_steps(self, runner: CacheRunner, token: torch.Tensor) -> float:
        """Seconds of one decode step: the mean of one turn."""

        def turn() -> None:
            for _ in range(self.settings.steps):
                runner.step(token)

        # Every new size is compiled for itself, as the first one in a process is.
        own_size = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        with own_size, runner.decoding():
            for _ in range(self.settings.uncounted_steps):
                runner.step(token)
            return Clock(token.device).seconds(turn) / self.settings.steps


@dataclass
class _Samples:
    """Seconds of each prompt and of one step, bytes after the last step, and what went wrong."""

    failure: str
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    cache_bytes: int = 0


class Comparison(Bench):
    """Measures all combinations."""

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
                torch.compiler.reset()  # what was compiled for other shapes
            samples = {spec: _Samples(RUNNERS[spec.name].obstacle() or "") for spec in specs}
            self._time(samples, context, batch)
            gc.collect()
            for spec, own in samples.items():
                row = dict.fromkeys(COLUMNS) | self.described(spec, context)
                row |= {"batch": batch, "status": own.failure or "ok", "bandwidth": self.bandwidth}
                row["weight_bytes"] = self.footprint.step_weight_bytes
                yield row if own.failure else row | self._figures(spec, context, batch, samples)

    def _time(self, samples: dict[CacheSpec, _Samples], context: int, batch: int) -> None:
        """Time prompts, then steps on the caches of the last prompts."""
        settings, ids = self.settings, prompt_ids(self.model, batch, context)
        able = (spec for spec, own in samples.items() if not own.failure)
        how = settings.prefill_chunk, settings.compiled
        runners = [spec.runner(self.model, *how) for spec in able]
        for name, rounds in (("", 1), ("prompt", settings.rounds), ("decode", settings.rounds)):
            for _, runner in interleaved(runners, rounds):
                own = samples[runner.spec]
                try:
                    if not own.failure:
                        self._turn(name, runner, ids, own)
                except Exception as error:
                    if runner.spec.name in _OWN:
                        raise
                    own.failure = f"failed: {one_line(error)}"
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
            samples.cache_bytes = runner.nbytes
        else:
            # The first forward of a kind finds algorithms and scratch memory; it does not count.
            self.time_prompt(runner, ids[:, :64])
            if not self.settings.compiled:  # a compiled step would be one for this short prompt
                with runner.decoding():
                    runner.step(ids[:, :1])
            runner.release()

    def _figures(
        self, spec: CacheSpec, context: int, batch: int, samples: dict[CacheSpec, _Samples]
    ) -> dict[str, Any]:
        own, entries, peak = samples[spec], spec.entries(context), None
        if self.settings.peak and own.prefill:
            with suppress(PeakRunFailedError):  # an empty cell; the times stand
                peak = self.peak(spec, context, batch)
            self.report(f"{context} x {batch}: memory, {spec.label}")
        # Bytes of its cache that a step must read; how "quantized" packs is its own affair.
        read = own.cache_bytes
        if spec.name != "quantized":
            read = self.footprint.cache_bytes(spec, batch, context, free=0)
        weights = self.footprint.step_weight_bytes
        limit = speedup_limit(weights, self.footprint.full_bytes(batch, context), read)
        decode = quartiles("decode", own.decode)
        values = {
            "entries": entries,
            "cache_bytes": own.cache_bytes,
            **quartiles("prefill", own.prefill),
            **decode,
            "tokens_per_second": batch / decode["decode"],
            "peak_bytes": peak and peak.peak,
            "limit": limit,
            "step_bytes": weights + read,
            "achieved": (weights + read) / decode["decode"],
        }
        full = samples.get(CacheSpec("dynamic"))
        if full is not None:
            values |= quartiles("speedup", ratios(full.decode, own.decode))
            values["share"] = values["speedup"] / limit
            if own.prefill:
                values |= quartiles("prefill_ratio", ratios(own.prefill, full.prefill))
        return values


_MOST_CORRECTIONS = 3


@dataclass(frozen=True)
class BatchMemory:
    """Memory by batch: ``weight + runtime + constant + batch * (cache + activation)``, in bytes."""

    weight: int
    runtime: int  # measured: what is held beside the weights
    constant: int  # measured: what a forward needs for any batch
    cache: int  # of a sequence
    activation: int  # measured: what a forward needs for each sequence

    @classmethod
    def of_peaks(cls, weights: int, cache: int, peaks: dict[int, Peak]) -> BatchMemory:
        """Find the measured parts from the peaks of the smallest and the largest batch."""
        few, many = min(peaks), max(peaks)
        slope = (peaks[many].peak - peaks[few].peak) / (many - few)
        activation = max(0, round(slope) - cache)
        runtime = max(0, peaks[few].loaded - weights)
        rest = peaks[few].peak - peaks[few].loaded - few * (cache + activation)
        return cls(weights, runtime, max(0, rest), cache, activation)

    def bytes(self, batch: int) -> int:
        fixed = self.weight + self.runtime + self.constant
        return fixed + batch * (self.cache + self.activation)

    def largest_batch(self, memory: int) -> int:
        """The largest batch that fits; 0 if not even one sequence does."""
        return max(0, (memory - self.bytes(0)) // max(1, self.cache + self.activation))


MAX_BATCH_COLUMNS = (
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


@dataclass
class MaxBatch(Bench):
    """Finds the largest batches; of the settings, batches and caches are not read."""

    memory: int  # bytes for everything
    max_run_batch: int  # larger batches are not really run

    columns = MAX_BATCH_COLUMNS

    def __post_init__(self) -> None:
        self.settings = replace(self.settings, caches=("dynamic", "h2o"))
        super().__post_init__()

    def check_fits(self, settings: Settings) -> None:
        # The straight line begins at batches of one and two, one cache at a time.
        own = replace(settings, batches=(2,), caches=("dynamic",), kv_bits=(), peak=True)
        super().check_fits(own)
        weights = self.footprint.weight_bytes
        if weights >= self.memory:
            raise ValueError(
                f"--memory {self.memory} bytes do not hold the model's {weights} bytes of weights;"
                " give more, fewer --layers or another --dtype"
            )

    @property
    def num_units(self) -> int:
        """About; batches may have to be corrected."""
        settings = self.settings
        return len(settings.contexts) * len(settings.specs()) * (3 + settings.rounds)

    def measured(self) -> Iterator[Row]:
        settings = self.settings
        for context in settings.contexts:
            candidates = [self._candidate(spec, context) for spec in settings.specs()]
            runnable = [candidate for candidate in candidates if candidate.run_batch]
            for _, own in interleaved(runnable, settings.rounds):
                ids = prompt_ids(self.model, own.run_batch, context)
                runner = own.spec.runner(self.model, settings.prefill_chunk, settings.compiled)
                own.prefill.append(self.time_prompt(runner, ids))
                own.decode.append(self.time_steps(runner, ids[:, :1]))
                runner.release()  # the caches of two of them do not fit at once
                self.report(f"{context}: batch {own.run_batch}, {own.spec.label}")
            for candidate in candidates:
                yield self._row(candidate, candidates[0], context)

    def _candidate(self, spec: CacheSpec, context: int) -> _Candidate:
        """Find the largest batch by arithmetic, and corrects it by running it."""
        cache = self.footprint.cache_bytes(spec, 1, context)
        weights = self.footprint.weight_bytes
        peaks = {batch: self._peak(spec, context, batch) for batch in (1, 2)}
        while True:
            # One and two sequences make a short line; a longer one predicts better. What it says
            # is moved to where the measurements leave it.
            memory = BatchMemory.of_peaks(weights, cache, peaks)
            fitting = [batch for batch, peak in peaks.items() if peak.peak <= self.memory]
            above = [batch - 1 for batch in peaks if batch not in fitting]
            largest = min([max([memory.largest_batch(self.memory), *fitting]), *above])
            if len(peaks) > 1 + _MOST_CORRECTIONS:  # the line and the measurements do not meet
                largest = max(fitting, default=0)
            runnable = 0 < largest <= self.max_run_batch and self._has_room(memory, largest)
            if largest in peaks or not runnable:
                break
            try:
                peaks[largest] = self._peak(spec, context, largest)
            except PeakRunFailedError:
                break
        verified = largest in fitting
        run = min(largest, self.max_run_batch)
        while run and not self._has_room(memory, run):
            run //= 2
        return _Candidate(spec, memory, largest, run, peaks, verified)

    def _has_room(self, memory: BatchMemory, batch: int) -> bool:
        """Whether this machine, the model loaded here too, can run a batch."""
        available = available_bytes(self.device)
        own = memory.weight if self.device.type == "cpu" else 0
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

    def _row(self, own: _Candidate, full: _Candidate, context: int) -> Row:
        peak = own.peaks.get(own.run_batch)
        row: dict[str, Any] = dict.fromkeys(MAX_BATCH_COLUMNS) | self.described(own.spec, context)
        row |= {f"{name}_bytes": value for name, value in asdict(own.memory).items()}
        row |= {name: getattr(own, name) for name in ("max_batch", "is_verified", "run_batch")}
        row |= {"memory_bytes": self.memory, "peak_bytes": peak and peak.peak}
        row |= quartiles("prefill", own.prefill) | quartiles("decode", own.decode)
        if own.decode:
            row["tokens_per_second"] = own.run_batch / row["decode"]
        if own.decode and full.decode:
            speeds, full_speeds = ([c.run_batch / s for s in c.decode] for c in (own, full))
            row |= quartiles("throughput_ratio", ratios(speeds, full_speeds))
        return row


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
