"""Timing: a clock that waits for the device, samples taken in turn, and their quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

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

    Args:
        items: What takes turns.
        rounds: How many.

    Yields:
        ``(round, item)``.
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
