"""What a user asks a benchmark for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from h2okv.budget import Budget
from h2okv.cache.positions import Positions
from h2okv.cache.refusals import check_kv_bits

CACHES = ("dynamic", "static", "quantized", "h2o", "kvpress")
"""The caches that can be compared."""
COMPILED = ("static", "h2o")
"""Those whose shapes stay as they are, so that a step can be compiled once."""
BUDGETED = ("static", "h2o", "kvpress")
"""Those of them that keep a budget."""


@dataclass(frozen=True)
class CacheChoice:
    """One cache to measure.

    Attributes:
        name: One of `CACHES`.
        budget: Tokens (int) or a fraction of the prompt (float), half of it for heavy hitters;
            ``None`` for caches that hold everything.
        positions: How H2O places its entries.
        kv_bits: Bits of a number of H2O's keys and values; ``None`` for the model's dtype.
    """

    name: str
    budget: int | float | None = None
    positions: Positions = "original"
    kv_bits: int | None = None

    @property
    def label(self) -> str:
        """How a table calls it."""
        if self.budget is None:
            return self.name
        bits = "" if self.kv_bits is None else f", {self.kv_bits} bits"
        share = isinstance(self.budget, float)
        budget = f"{100 * self.budget:g} %" if share else str(self.budget)
        return f"{self.name} {budget}{bits}"

    def parts(self) -> dict[str, Any]:
        """The budget as `h2okv.H2OCache` takes it."""
        assert self.budget is not None
        if isinstance(self.budget, float):
            return {"heavy": self.budget / 2, "recent": self.budget / 2}
        heavy = self.budget // 2
        return {"heavy": heavy, "recent": self.budget - heavy}

    def entries(self, context: int) -> int:
        """Entries that one KV head holds after a prompt of so many tokens: K, or all."""
        if self.budget is None:
            return context
        return Budget(**self.parts()).resolve(context).total


@dataclass(frozen=True)
class Settings:
    """The combinations to measure, and how.

    Attributes:
        contexts: Lengths of the prompts, in tokens.
        batches: Numbers of sequences.
        budgets: Tokens or fractions of the prompt.
        caches: Names of `CACHES`.
        positions: How H2O places its entries.
        dtypes: Of weights and caches.
        rounds: In each, every cache takes its turn.
        steps: Decode steps of one turn; their mean is one sample.
        prefill_chunk: Tokens of a block of the prompt; ``None`` reads it at once.
        peak: Whether to measure peak memory, in processes of its own.
        compiled: Whether decode steps of `static` and `h2o` run through ``torch.compile``.
        kv_bits: `h2o` runs once more for each of these, with keys and values in so many bits.

    Raises:
        ValueError: If there is nothing to measure, or a value makes no sense.
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
        """Refuses what makes no sense."""
        for name, least in (("rounds", 1), ("steps", 1), ("prefill_chunk", 1)):
            self._check_least(name, getattr(self, name), least)
        for context in self.contexts:
            self._check_least("contexts", context, 8)
        for batch in self.batches:
            self._check_least("batches", batch, 1)
        for name in ("contexts", "batches", "budgets", "caches", "dtypes"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"--{name} names nothing; give at least one value")
            self._check_distinct(name, values)
        self._check_distinct("kv-bits", self.kv_bits)
        for bits in self.kv_bits:
            check_kv_bits(bits)
        if self.kv_bits and "h2o" not in self.caches:
            raise ValueError("--kv-bits is about h2o; name it among the --caches, or leave it out")
        for budget in self.budgets:
            _check_budget(budget)
        for name in self.caches:
            if name not in CACHES:
                raise ValueError(
                    f"--caches: {name!r} is not known; choose from {', '.join(CACHES)}"
                )
        if self.positions not in ("original", "rolling"):
            raise ValueError(
                f"--positions {self.positions!r} cannot be measured; choose original or rolling"
            )

    @staticmethod
    def _check_least(name: str, value: int | None, least: int) -> None:
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {value} is too few; give {least} or more")

    @staticmethod
    def _check_distinct(name: str, values: tuple[Any, ...]) -> None:
        if len(set(values)) != len(values):
            raise ValueError(f"--{name} names a value twice; give each once")

    def choices(self) -> list[CacheChoice]:
        """All caches that take turns on one prompt, those that hold everything first."""
        whole = [CacheChoice(name) for name in self.caches if name not in BUDGETED]
        return whole + [
            CacheChoice(name, budget, self.positions, bits)
            for budget in self.budgets
            for name in self.caches
            if name in BUDGETED
            for bits in ((None, *self.kv_bits) if name == "h2o" else (None,))
        ]

    def most_seen(self, context: int) -> int:
        """The most tokens of one sequence: the prompt, and all steps after it."""
        return context + self.rounds * (self.uncounted_steps + self.steps)

    @property
    def uncounted_steps(self) -> int:
        """Steps at the beginning of a turn that are not timed; compiling takes several."""
        return 4 if self.compiled else 1

    def check_window(self, window: int | None) -> None:
        """Refuses contexts that the model cannot read.

        Args:
            window: Its positions; ``None`` for no limit.

        Raises:
            ValueError: If the longest context and its steps are above them.
        """
        context = max(self.contexts)
        longest = self.most_seen(context)
        if window is not None and longest > window:
            raise ValueError(
                f"--contexts {context} and {longest - context} decode steps are above the model's"
                f" window of {window} tokens; give a shorter context, or"
                " random weights with another one, such as --shape llama-3-8b,window=65536"
            )


def _check_budget(budget: Any) -> None:
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError(
                f"--budgets {budget:g} is out of range; give a fraction above 0 and up to 1, or"
                " tokens"
            )
    elif budget < 2:
        raise ValueError(f"--budgets {budget} is too few; give 2 tokens or more, or a fraction")
