"""Caches side by side: every combination of a benchmark, measured in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.benchmarking.clock import Clock, Spread, in_turn
from h2okv.benchmarking.contestant import Contestant, one_line, static_shapes
from h2okv.benchmarking.footprint import Footprint
from h2okv.benchmarking.limit import speedup_limit
from h2okv.benchmarking.lineup import contestant_class
from h2okv.benchmarking.row import Row
from h2okv.benchmarking.settings import COMPILED, CacheChoice, Settings
from h2okv.benchmarking.source import ModelSource
from h2okv.benchmarking.trial import Trial, TrialFailedError, measure_peak, prompt_ids

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
