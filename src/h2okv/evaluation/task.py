"""What can be evaluated: samples, and scores that are made of their results."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.result_file import Result
from h2okv.evaluation.subject import Subject


@dataclass(frozen=True)
class Score:
    """One figure.

    Attributes:
        value: The figure.
        stderr: The standard error of its mean over samples; None where it is no mean.
    """

    value: float
    stderr: float | None = None


class Task(ABC):
    """Something to evaluate.

    Attributes:
        name: What tables call it.
        columns: What tells it from others of the same name, for columns of its own.
        metrics: The names of its scores.
        headline: The one of them that pictures show; the first if none is named.
        higher_is_better: Whether a higher headline is a better one.
    """

    name: str
    columns: Mapping[str, Any] = MappingProxyType({})
    metrics: ClassVar[tuple[str, ...]]
    headline: ClassVar[str] = ""
    higher_is_better: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """Its name and columns in one."""
        return ", ".join([self.name, *(f"{name} {value}" for name, value in self.columns.items())])

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Says what its results depend on, except for the model, the cache and the seed."""

    @abstractmethod
    def prepare(self, subject: Subject, settings: Sequence[CacheSetting]) -> None:
        """Makes the samples ready for a model.

        Args:
            subject: The model.
            settings: All caches that it will be run with.

        Raises:
            ValueError: If a sample cannot be run with one of them.
        """

    @abstractmethod
    def samples(self) -> Sequence[int]:
        """Returns the samples' numbers; known when `prepare` has run."""

    @abstractmethod
    def run(
        self, subject: Subject, setting: CacheSetting, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Evaluates samples.

        Args:
            subject: The model.
            setting: The cache.
            samples: Some of `samples()`, in any order; what one of them gives does not depend on
                which others are run.
            seed: Where random numbers start.

        Yields:
            Results by sample, as they become known.
        """

    @abstractmethod
    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Makes the scores, by metric.

        Args:
            results: Of all samples.
        """

    def size(self, results: Mapping[int, Result]) -> int:
        """Counts what the scores are made of: the samples, unless said otherwise."""
        return len(results)

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """Makes the rows of a table that tells more than `scores`: one row, unless said otherwise.

        Args:
            results: Of all samples.

        Returns:
            Rows with the same names.
        """
        return [{name: score.value for name, score in self.scores(results).items()}]


def mean(results: Mapping[int, Result], name: str) -> Score:
    """Averages a figure over samples.

    Args:
        results: Each with that figure; at least one.
        name: The figure's name.

    Returns:
        The mean and its standard error.
    """
    values = [float(result[name]) for result in results.values()]
    if len(values) < 2:
        return Score(values[0])
    return Score(statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5)
