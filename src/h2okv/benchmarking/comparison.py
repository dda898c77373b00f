"""Prefill, decode step and memory of several caches, measured in turn on the same prompts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

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
from h2okv.cache.layer import CacheLayer
from h2okv.cache.validation import check_kv_bits
from h2okv.config import CacheConfig, Positions
from h2okv.console import check_least
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.offload.profile import Clock
from h2okv.records import Row

_OWN = ("dynamic", "static", "h2o")
"""A failure of these ends the run; one in another package's cache ends that cache alone."""


@dataclass(frozen=True)
class Settings:
    """The combinations to measure, and how; the fields are options of `h2okv bench`.

    ``steps`` are the decode steps of one turn, whose mean is one sample; ``h2o`` runs once more for
    each of ``kv_bits``.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    configs: tuple[CacheConfig, ...]
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
        lists = {
            "contexts": self.contexts, "batches": self.batches, "budget": self.configs,
            "caches": self.caches, "dtype": self.dtypes, "kv-bits": self.kv_bits,
        }  # fmt: skip
        for option, values in lists.items():
            if not values and option != "kv-bits":
                raise ValueError(f"--{option} names nothing; give at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"--{option} names a value twice; give each once")
        chunk = () if self.prefill_chunk is None else (self.prefill_chunk,)
        for option, numbers, least in (
            ("rounds", (self.rounds,), 1), ("steps", (self.steps,), 1), ("prefill-chunk", chunk, 1),
            ("contexts", self.contexts, 8), ("batches", self.batches, 1),
        ):  # fmt: skip
            for number in numbers:
                check_least(least, **{option: number})
        if any(config.is_full for config in self.configs):
            raise ValueError(
                "--budget full has no meaning here; --caches dynamic is the full cache"
            )
        for bits in self.kv_bits:
            check_kv_bits(bits)
        for name in self.caches:
            if name not in RUNNERS:
                raise ValueError(
                    f"--caches: {name!r} is not known; choose from {', '.join(RUNNERS)}"
                )
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
            reading = max(reading, batch * footprint.memory().num_heads * context**2 * 4)
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


_BATCH, _PROMPT, _STEPS = 2, 96, 8
# In fp32, and in half precision. Entries of nearly equal score may change places by rounding alone.
_LARGEST_ERROR = (1e-3, 5e-2)
_LARGEST_DIFFERENCE = (0.002, 0.02)


class CheckFailedError(Exception):
    """H2O does not compute what it must, so that its speed means nothing."""


def check_h2o(model: PreTrainedModel, **options: Any) -> dict[str, float | None]:
    """Holds H2O to full attention and to its masking simulation, on a small prompt.

    ``options`` are those of `H2OCache`; the model's attention implementation is mutated. Returns
    ``full_error``, the largest difference of logits between a cache with K >= length and full
    attention, relative to the largest logit (of packed entries, which round, and a full cache that
    rounds alike); ``drop_error``, that between dropping and masking, ``None`` in half precision,
    where two right results part by rounding; ``kept_difference``, the fraction of the entries kept
    by dropping that masking does not keep, in half precision of the first layer alone, whose input
    is the same for both.
    """
    is_half = model.dtype != torch.float32
    ids = prompt_ids(model, _BATCH, _PROMPT + _STEPS)

    def logits(heavy: int | float, simulate: bool = False) -> tuple[torch.Tensor, h2okv.H2OCache]:
        cache = h2okv.H2OCache(model.config, heavy, heavy, simulate=simulate, **options)
        return _logits(model, ids, cache, ATTENTION_NAME), cache

    if options.get("kv_bits") is None:
        full = _logits(model, ids, DynamicCache(config=model.config), "sdpa")
    else:
        full, _ = logits(_PROMPT, simulate=True)
    whole, _ = logits(_PROMPT)
    dropped, dropping = logits(0.1)
    masked, masking = logits(0.1, simulate=True)
    largest = full.abs().max()
    error = float((whole - full).abs().max() / largest)
    drop_error = float((dropped - masked).abs().max() / largest)
    difference = _kept_difference(dropping, masking, first_layer_only=is_half)
    limit = _LARGEST_ERROR[is_half]
    for what, found, largest_right in (
        ("with K >= length it differs from full attention", error, limit),
        ("it keeps other entries than its simulation", difference, _LARGEST_DIFFERENCE[is_half]),
        ("it differs from its simulation", 0.0 if is_half else drop_error, limit),
    ):
        # Not "found > largest_right", which NaN would pass.
        if not found <= largest_right:
            raise CheckFailedError(
                f"the check of H2O in {dtype_name(model.dtype)} failed: {what} by {found:.2g} (at"
                f" most {largest_right:g} is rounding), so no speed is reported"
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
        outputs = [model(part, past_key_values=cache, logits_to_keep=1).logits for part in parts]
    return torch.cat(outputs, dim=1).float()


def _kept_difference(
    dropping: h2okv.H2OCache, masking: h2okv.H2OCache, first_layer_only: bool
) -> float:
    """Fraction of what one cache keeps that the other one does not."""
    kept = differing = 0
    evicting = [n for n, layer in enumerate(dropping.layers) if isinstance(layer, CacheLayer)]
    for layer_idx in evicting[: 1 if first_layer_only else None]:
        real, expected = (cache.kept_positions(layer_idx) for cache in (dropping, masking))
        for own, other in zip(real.flatten(0, 1), expected.flatten(0, 1), strict=True):
            held, wanted = (set(positions[positions >= 0].tolist()) for positions in (own, other))
            kept += len(wanted)
            differing += max(len(held - wanted), len(wanted - held))
    return differing / kept


COLUMNS = (
    "model", "dtype", "positions", "context", "batch", "budget", "cache", "kv_bits", "status",
    "rounds", "steps", "prefill_chunk", "compiled", "entries", "cache_bytes", "weight_bytes",
    *triple("prefill"), *triple("decode"), "tokens_per_second", "peak_bytes",
    *triple("prefill_ratio"), *triple("speedup"), "limit", "share", "step_bytes", "achieved",
    "bandwidth",
)  # fmt: skip
"""What is told of one cache in one combination, ``None`` where nothing was measured.

Times are in seconds, sizes in bytes; docs/benchmarking.md says what each column is.
"""


@dataclass(frozen=True)
class Bench:
    """A model of one dtype, its checks passed, and what is wanted of it.

    The model's attention implementation is mutated. ``source`` tells another process how to build
    it, and ``report`` hears what was done, as often as ``count_units`` says.
    """

    model: PreTrainedModel
    source: ModelSource
    footprint: Footprint
    settings: Settings
    report: Callable[[str], None]

    def described(self, spec: CacheSpec, context: int) -> dict[str, Any]:
        """The columns that say what ran, and how."""
        settings = self.settings
        return {
            "model": self.source.name, "dtype": dtype_name(self.model.dtype),
            "positions": settings.positions, "context": context, "budget": spec.budget,
            "cache": spec.name, "kv_bits": spec.kv_bits, "rounds": settings.rounds,
            "steps": settings.steps, "prefill_chunk": settings.prefill_chunk,
            "compiled": settings.compiled and RUNNERS[spec.name].can_compile,
        }  # fmt: skip

    def peak(self, spec: CacheSpec, context: int, batch: int) -> Peak | None:
        """Measures the memory of one cache."""
        run = PeakRun(
            self.source, self.model.dtype, self.model.device, torch.get_num_threads(), spec,
            context, batch, prefill_chunk=self.settings.prefill_chunk,
        )  # fmt: skip
        return measure_peak(run, self.model)

    def time_steps(self, runner: CacheRunner, token: torch.Tensor) -> float:
        """Seconds of one decode step: the mean of one turn."""

        def turn() -> None:
            for _ in range(self.settings.steps):
                runner.step(token)

        with runner.decoding():
            for _ in range(self.settings.uncounted_steps):
                runner.step(token)
            return Clock(token.device).seconds(turn) / self.settings.steps


@dataclass
class _Samples:
    """Seconds of each prompt and of one step, bytes after the last step, and what went wrong."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Comparison(Bench):
    """Measures all combinations; ``bandwidth`` is this machine's, in bytes a second."""

    bandwidth: float

    @staticmethod
    def count_units(settings: Settings) -> int:
        """How often a comparison of one dtype reports."""
        able = [spec for spec in settings.specs() if RUNNERS[spec.name].obstacle() is None]
        peaks = sum(RUNNERS[spec.name].reads_prompt for spec in able) if settings.peak else 0
        combinations = len(settings.contexts) * len(settings.batches)
        return combinations * (2 * settings.rounds * len(able) + peaks)

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
            row = dict.fromkeys(COLUMNS) | self.described(spec, context)
            row |= {"batch": batch, "status": status or "ok", "bandwidth": self.bandwidth}
            row["weight_bytes"] = self.footprint.step_weight_bytes
            yield row if status else row | self._figures(spec, context, batch, samples)

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
        short = ids[:, :64]
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
        samples.decode.append(self.time_steps(runner, ids[:, :1]))
        samples.cache_bytes = runner.nbytes

    def _figures(
        self, spec: CacheSpec, context: int, batch: int, samples: dict[CacheSpec, _Samples]
    ) -> dict[str, Any]:
        own, entries, peak = samples[spec], spec.entries(context), None
        if self.settings.peak and own.prefill:
            try:
                peak = self.peak(spec, context, batch)
            except PeakRunFailedError:
                peak = None  # an empty cell; the times stand
            self.report(f"{context} x {batch}: memory, {spec.label}")
        # Bytes of its cache that a step must read.
        if spec.name == "quantized":
            read = own.cache_bytes  # how it packs is its own affair
        elif spec.name == "h2o":
            read = self.footprint.h2o_bytes(batch, entries, context, spec.kv_bits)
        else:
            read = self.footprint.full_bytes(batch, entries)
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


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def static_shapes() -> AbstractContextManager[Any]:
    """Compiles every new size for itself, as the first one in a process is, not for any size."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)
