"""Interleaved rounds, medians with quartiles, and rows of results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import numpy

_T = TypeVar("_T")


def interleaved(items: Sequence[_T], rounds: int) -> Iterator[tuple[int, _T]]:
    """Gives all items in every round, so that a slow moment of the machine hits all of them.

    The order is reversed in every other round: none always runs in another one's warm cache.
    """
    for number in range(rounds):
        for item in items if number % 2 == 0 else list(reversed(items)):
            yield number, item


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

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
class Percentiles:
    """Three points of a distribution; between two values in proportion."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles | None:
        """Takes the percentiles of the values that are there; ``None`` if none is."""
        there = [value for value in values if value is not None]
        if not there:
            return None
        return cls(*(float(value) for value in numpy.quantile(there, (0.5, 0.95, 0.99))))


_PARTS = {
    "Spread": {"": "median", "_lower": "lower", "_upper": "upper"},
    "Percentiles": {"_p50": "p50", "_p95": "p95", "_p99": "p99"},
}


class ResultRow:
    """A dataclass of results as plain columns: a `Spread` or `Percentiles` becomes three."""

    def cells(self) -> dict[str, Any]:
        """The values by column."""
        values = asdict(self)  # type: ignore[call-overload]
        return {
            name + end: values[name] and values[name][part] if part else values[name]
            for name, end, part in self._parts()
        }

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The columns, in order."""
        return tuple(name + end for name, end, _ in cls._parts())

    @classmethod
    def _parts(cls) -> Iterator[tuple[str, str, str]]:
        for field in fields(cls):  # type: ignore[arg-type]
            kind = str(field.type).removesuffix(" | None")
            for end, part in _PARTS.get(kind, {"": ""}).items():
                yield field.name, end, part
