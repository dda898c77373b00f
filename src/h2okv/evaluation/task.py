"""What an evaluation task is."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from h2okv.engine.sampler import sample_seed
from h2okv.evaluation.cache_setting import CacheSetting, Subject
from h2okv.evaluation.decoding import Decoding
from h2okv.evaluation.generate import Answer, Prompt, answer_batch
from h2okv.records import Row as Result


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
        """Makes the samples ready for a model."""

    @abstractmethod
    def samples(self) -> Sequence[int]:
        """Returns the samples' numbers; known when `prepare` has run."""

    @abstractmethod
    def run(
        self, subject: Subject, setting: CacheSetting, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Evaluates samples."""

    @abstractmethod
    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Makes the scores, by metric."""

    def size(self, results: Mapping[int, Result]) -> int:
        """Counts what the scores are made of: the samples, unless said otherwise."""
        return len(results)

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """Makes the rows of a more detailed table than `scores`; one row by default."""
        return [{name: score.value for name, score in self.scores(results).items()}]


def mean(results: Mapping[int, Result], name: str) -> Score:
    """Averages a figure over samples."""
    values = [float(result[name]) for result in results.values()]
    if len(values) < 2:
        return Score(values[0])
    return Score(statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5)


TooLong = Literal["refuse", "skip"]
TOO_LONG: tuple[TooLong, ...] = ("refuse", "skip")


@dataclass(frozen=True)
class Length:
    """A sample's length.

    Attributes:
        tokens: Of the prompt and the most of the answer, together.
        where: The sample, for messages.
    """

    tokens: int
    where: str


def fitting(
    subject: Subject,
    settings: Sequence[CacheSetting],
    lengths: Sequence[Length],
    too_long: TooLong,
) -> list[int]:
    """Chooses the samples that are run, the same ones for all caches."""
    kept = list(range(len(lengths)))
    if too_long == "skip" and subject.window is not None:
        kept = [n for n in kept if lengths[n].tokens <= subject.window]
        if not kept:
            shortest = min(length.tokens for length in lengths)
            raise ValueError(
                f"every sample is above the model's window of {subject.window} tokens (the"
                f" shortest has {shortest}, its answer included), so that none is left; use"
                " --positions rolling"
            )
    for setting in settings:
        for n in kept:
            tokens = lengths[n].tokens
            reason = setting.too_long(subject.config, subject.window, tokens)
            if reason is not None:
                raise ValueError(
                    f"{lengths[n].where} has {tokens} tokens, the most of its answer included; for"
                    f" the cache {setting.label!r} {reason}"
                )
    return kept


@dataclass(frozen=True)
class BatchOptions:
    """How prompts are run.

    Attributes:
        batch_size: Prompts at a time.
        limit: Run the first so many samples only; None for all.
        too_long: What to do with samples above the model's window.
        max_new_tokens: The most tokens of an answer; None for what the sample says.
    """

    batch_size: int = 8
    limit: int | None = None
    too_long: TooLong = "refuse"
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses what nothing can be run with."""
        for name in ("batch_size", "limit", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {value} is too few; give 1 or more")


@dataclass(frozen=True)
class TextPrompt:
    """A prompt before it becomes tokens.

    Attributes:
        text: What the model goes on from.
        max_new_tokens: The most tokens of the answer.
        stops: Strings that end it.
        where: The sample, for messages.
    """

    text: str
    max_new_tokens: int
    stops: tuple[str, ...]
    where: str


class GenerationTask(Task):
    """Prompts that a model answers, each sample one."""

    def __init__(self, options: BatchOptions, decoding: Decoding) -> None:
        self.options = options
        self.decoding = decoding
        self._prompts: list[Prompt] = []
        self._samples: Sequence[int] = ()

    @abstractmethod
    def prompts(self) -> Sequence[TextPrompt]:
        """Returns all prompts."""

    @abstractmethod
    def result(self, sample: int, answer: Answer) -> Result:
        """Scores an answer."""

    def prepare(self, subject: Subject, settings: Sequence[CacheSetting]) -> None:
        """Makes the prompts tokens, and chooses those that are run."""
        wanted = self.prompts()[: self.options.limit]
        most = self.options.max_new_tokens
        self._prompts = [
            Prompt(subject.encode(p.text), most or p.max_new_tokens, p.stops) for p in wanted
        ]
        lengths = [
            Length(len(prompt.ids) + prompt.max_new_tokens, text.where)
            for prompt, text in zip(self._prompts, wanted, strict=True)
        ]
        self._samples = fitting(subject, settings, lengths, self.options.too_long)

    def samples(self) -> Sequence[int]:
        """Returns the numbers of the prompts that are run."""
        return self._samples

    def run(
        self, subject: Subject, setting: CacheSetting, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Answers prompts, those of about the same length together."""
        by_length = sorted(samples, key=lambda n: (self._prompts[n].stops, -self._length(n)))
        while by_length:
            stops = self._prompts[by_length[0]].stops
            batch = [n for n in by_length[: self.options.batch_size] if self._stops(n) == stops]
            by_length = by_length[len(batch) :]
            prompts = [replace(self._prompts[n], seed=sample_seed(seed, n)) for n in batch]
            answers = answer_batch(subject, setting, prompts, self.decoding, seed)
            yield {n: self.result(n, answer) for n, answer in zip(batch, answers, strict=True)}

    def _length(self, sample: int) -> int:
        return len(self._prompts[sample].ids)

    def _stops(self, sample: int) -> tuple[str, ...]:
        return self._prompts[sample].stops
