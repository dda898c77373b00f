"""What an evaluation task is."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from h2okv.config import CacheConfig
from h2okv.engine.sampler import sample_seed
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.generate import Answer, Prompt, answer_batch
from h2okv.evaluation.model import ModelUnderTest

Result = Mapping[str, Any]
"""What came of one sample: JSON values by name."""

TooLong = Literal["refuse", "skip"]
TOO_LONG: tuple[TooLong, ...] = ("refuse", "skip")
Compression = Literal["query-aware", "query-agnostic"]
COMPRESSIONS: tuple[Compression, ...] = ("query-aware", "query-agnostic")
"""Whether the cache is compressed with the question at hand, or before it is known."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Score:
    """One figure; its standard error is ``None`` where it is not a mean over samples."""

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
        """What its results depend on, except for the model, the cache and the seed."""

    @abstractmethod
    def prepare(self, model: ModelUnderTest, configs: Sequence[CacheConfig]) -> None:
        """Makes the samples ready for a model, whose weights need not be loaded."""

    @abstractmethod
    def samples(self) -> Sequence[int]:
        """The samples' numbers; known when `prepare` has run."""

    @abstractmethod
    def run(
        self, model: ModelUnderTest, config: CacheConfig, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Evaluates samples."""

    def run_together(
        self,
        model: ModelUnderTest,
        configs: Sequence[CacheConfig],
        samples: Sequence[int],
        seed: int,
    ) -> Iterator[tuple[int, dict[int, Result]]]:
        """Evaluates samples with several caches; gives numbers of caches, and their results."""
        for number, config in enumerate(configs):
            for results in self.run(model, config, samples, seed):
                yield number, results

    @abstractmethod
    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """The scores, by metric."""

    def size(self, results: Mapping[int, Result]) -> int:
        """What the scores are made of: the samples, unless said otherwise."""
        return len(results)

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """The rows of a more detailed table than `scores`; one row by default."""
        return [{name: score.value for name, score in self.scores(results).items()}]


def mean(results: Mapping[int, Result], name: str) -> Score:
    """Averages a figure over samples."""
    values = [float(result[name]) for result in results.values()]
    if len(values) < 2:
        return Score(values[0])
    return Score(statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5)


def check_counts(**counts: int | None) -> None:
    """Refuses options that are less than 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"--{name.replace('_', '-')} {count} is too few; give 1 or more")


class SharingTask(Task):
    """A task whose caches share what they read: it defines `run_together`."""

    def run(
        self, model: ModelUnderTest, config: CacheConfig, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Evaluates samples with one cache."""
        for _, results in self.run_together(model, [config], samples, seed):
            yield results


@dataclass(frozen=True)
class Length:
    """A sample's length: tokens of the prompt and the most of the answer; and where it stands."""

    tokens: int
    place: str


def filter_by_length(
    model: ModelUnderTest,
    configs: Sequence[CacheConfig],
    lengths: Sequence[Length],
    too_long: TooLong | None = None,
) -> list[int]:
    """Chooses the samples that are run, the same ones for all caches.

    Args:
        model: What reads them.
        configs: The caches.
        lengths: Of all samples.
        too_long: Whether samples above the context window are left out or refused; ``None`` if
            they are refused and the user cannot choose.

    Returns:
        The numbers of those that are run.

    Raises:
        ValueError: If none is left, or one is too long.
    """
    kept = list(range(len(lengths)))
    if too_long == "skip" and model.window is not None:
        kept = [n for n in kept if lengths[n].tokens <= model.window]
        if not kept:
            shortest = min(length.tokens for length in lengths)
            raise ValueError(
                f"every sample is above the model's context window of {model.window} tokens (the"
                f" shortest has {shortest}, its answer included), so that none is left; use"
                " --positions rolling"
            )
    for config in configs:
        for n in kept:
            tokens = lengths[n].tokens
            reason = model.too_long(config, tokens)
            if reason is not None:
                skip = ", or --too-long skip" if too_long == "refuse" else ""
                raise ValueError(
                    f"{lengths[n].place} has {tokens} tokens, the most of its answer included; for"
                    f" the cache {config.label!r} {reason}{skip}"
                )
    return kept


@dataclass(frozen=True)
class BatchOptions:
    """How prompts are run.

    Attributes:
        batch_size: Prompts at a time.
        limit: Run the first so many samples only; ``None`` for all.
        too_long: What to do with samples above the context window.
        max_new_tokens: The most tokens of an answer; ``None`` for what the sample says.
    """

    batch_size: int = 8
    limit: int | None = None
    too_long: TooLong = "refuse"
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        check_counts(
            batch_size=self.batch_size, limit=self.limit, max_new_tokens=self.max_new_tokens
        )


@dataclass(frozen=True)
class TextPrompt:
    """A prompt before it is tokenized.

    Attributes:
        text: What the model goes on from.
        max_new_tokens: The most tokens of the answer.
        stops: Strings that end it.
        place: The sample, for messages.
    """

    text: str
    max_new_tokens: int
    stops: tuple[str, ...]
    place: str


class GenerationTask(Task):
    """Prompts that a model answers, each a sample."""

    def __init__(self, options: BatchOptions, params: SamplingParams) -> None:
        self.options = options
        self.params = params
        self._prompts: list[Prompt] = []
        self._samples: Sequence[int] = ()

    @abstractmethod
    def prompts(self) -> Sequence[TextPrompt]:
        """All prompts."""

    @abstractmethod
    def result(self, sample: int, answer: Answer) -> Result:
        """Scores an answer."""

    def identity(self) -> Mapping[str, Any]:
        """How prompts are answered; tasks add what they are."""
        params = self.params
        settings = {
            "max_new_tokens": self.options.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        # Only where they were asked for, so that results without them stay known.
        for name in ("top_k", "min_p", "repetition_penalty", "stop"):
            if getattr(params, name) != getattr(SamplingParams, name):
                settings[name] = getattr(params, name)
        return settings

    def prepare(self, model: ModelUnderTest, configs: Sequence[CacheConfig]) -> None:
        """Tokenizes the prompts, and chooses those that are run."""
        wanted = self.prompts()[: self.options.limit]
        self._prompts = [Prompt(model.encode(p.text), self._params_of(p)) for p in wanted]
        lengths = [
            Length(len(prompt.ids) + prompt.max_new_tokens, text.place)
            for prompt, text in zip(self._prompts, wanted, strict=True)
        ]
        self._samples = filter_by_length(model, configs, lengths, self.options.too_long)

    def samples(self) -> Sequence[int]:
        """The numbers of the prompts that are run."""
        return self._samples

    def run(
        self, model: ModelUnderTest, config: CacheConfig, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Answers prompts, those of about the same length together."""
        by_length = sorted(samples, key=lambda n: (self._stops(n), -len(self._prompts[n].ids)))
        while by_length:
            stops = self._stops(by_length[0])
            batch = [n for n in by_length[: self.options.batch_size] if self._stops(n) == stops]
            by_length = by_length[len(batch) :]
            answers = answer_batch(model, config, [self._seeded(n, seed) for n in batch], seed)
            yield {n: self.result(n, answer) for n, answer in zip(batch, answers, strict=True)}

    def _params_of(self, prompt: TextPrompt) -> SamplingParams:
        most = self.options.max_new_tokens or prompt.max_new_tokens
        stop = tuple(dict.fromkeys((*prompt.stops, *self.params.stop)))
        return replace(self.params, max_tokens=most, stop=stop)

    def _seeded(self, sample: int, seed: int) -> Prompt:
        prompt = self._prompts[sample]
        return replace(prompt, params=replace(prompt.params, seed=sample_seed(seed, sample)))

    def _stops(self, sample: int) -> tuple[str, ...]:
        return self._prompts[sample].params.stop
