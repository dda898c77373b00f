"""What an evaluation task is, and the tasks whose samples are prompts to be answered."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any, ClassVar, Literal, NamedTuple

from h2okv.config import CacheConfig
from h2okv.console import check_least
from h2okv.engine.sampler import sample_seed
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.model import Answer, ModelUnderTest, Prompt, answer_batch

Configs = Sequence[CacheConfig]
Result = Mapping[str, Any]  # what came of one sample: JSON values by name
Found = Iterator[tuple[int, dict[int, Result]]]  # numbers of caches, each with results by sample
TooLong = Literal["refuse", "skip"]


class Score(NamedTuple):
    """One figure; its standard error is ``None`` where it is not a mean over samples."""

    value: float
    stderr: float | None = None


@dataclass(eq=False)
class Task(ABC):
    """Something to evaluate. Its fields are its options, in experiment files too."""

    name: str  # what tables call it
    samples: Sequence[int] = field(init=False)  # their numbers; known when `prepare` has run
    metrics: ClassVar[tuple[str, ...]]  # the names of its scores
    headline: ClassVar[str] = ""  # the one that pictures show; the first if none is named

    @property
    def columns(self) -> Mapping[str, Any]:
        """What tells it from others of the same name, for columns of its own."""
        return {}

    @property
    def label(self) -> str:
        """Its name and columns in one."""
        return ", ".join([self.name, *(f"{name} {value}" for name, value in self.columns.items())])

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """What its results depend on, except for the model, the cache and the seed."""

    @abstractmethod
    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        """Make the samples ready for a model, whose weights need not be loaded."""

    @abstractmethod
    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> Found:
        """Evaluate samples with several caches, which may share what they read."""

    def within_window(
        self,
        model: ModelUnderTest,
        configs: Configs,
        lengths: Sequence[tuple[int, str]],  # of all: tokens, the answer's included, and place
        too_long: TooLong | None = None,  # None refuses where the user cannot choose
    ) -> list[int]:
        """The numbers of the samples that are run; others are above the context window."""
        kept = list(range(len(lengths)))
        if too_long == "skip" and model.window is not None:
            kept = [n for n in kept if lengths[n][0] <= model.window]
            if not kept:
                raise ValueError(
                    f"every sample is above the model's context window of {model.window} tokens"
                    f" (the shortest has {min(lengths)[0]}, its answer included), so that none is"
                    " left; use --positions rolling"
                )
        for config, n in product(configs, kept):
            tokens, place = lengths[n]
            reason = model.too_long(config, tokens)
            if reason is not None:
                skip = ", or --too-long skip" if too_long == "refuse" else ""
                raise ValueError(
                    f"{place} has {tokens} tokens, the most of its answer included; for the cache"
                    f" {config.label!r} {reason}{skip}"
                )
        return kept

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """The scores, by metric; means over the samples unless a task says otherwise."""
        return {name: mean(own[name] for own in results.values()) for name in self.metrics}

    def size(self, results: Mapping[int, Result]) -> int:
        """What the scores are made of: the samples, unless said otherwise."""
        return len(results)

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """The rows of a more detailed table than `scores`; one row by default."""
        return [{name: score.value for name, score in self.scores(results).items()}]


def mean(values: Iterable[float]) -> Score:
    """Average a figure over samples."""
    found = [float(value) for value in values]
    if len(found) < 2:
        return Score(found[0])
    return Score(statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5)


@dataclass(frozen=True)
class TextPrompt:
    """A prompt before it is tokenized."""

    text: str
    max_new_tokens: int
    stops: tuple[str, ...]  # strings that end the answer
    place: str  # file and line, for messages
    references: tuple[str, ...] = ()  # answers that people wrote


# What of `SamplingParams` a task of prompts may be given.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")


@dataclass(eq=False, kw_only=True)
class GenerationTask(Task):
    """Prompts that a model answers, each a sample; subclasses read them and score the answers."""

    batch_size: int = 8
    limit: int | None = None  # run the first so many samples only
    too_long: TooLong = "skip"  # what becomes of samples above the context window
    max_new_tokens: int | None = None  # None for what the sample says
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()  # beside those of the prompt
    prompts: Sequence[TextPrompt] = field(init=False)

    def __post_init__(self) -> None:
        check_least(
            batch_size=self.batch_size, limit=self.limit, max_new_tokens=self.max_new_tokens
        )
        self._params = SamplingParams(**{name: getattr(self, name) for name in SAMPLING})

    @abstractmethod
    def result(self, sample: int, answer: Answer) -> Result:
        """Score an answer."""

    def identity(self) -> Mapping[str, Any]:
        asked: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        for name in SAMPLING:
            value = getattr(self._params, name)
            # The others only where they were asked for, so that results without them stay known.
            if name in ("temperature", "top_p") or value != getattr(SamplingParams, name):
                asked[name] = value
        return asked

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        self._encoded: list[Prompt] = []
        lengths: list[tuple[int, str]] = []
        for prompt in self.prompts[: self.limit]:
            most = self.max_new_tokens or prompt.max_new_tokens
            ids = model.encode(prompt.text)
            stop = tuple(dict.fromkeys((*prompt.stops, *self.stop)))
            self._encoded.append(Prompt(ids, replace(self._params, max_tokens=most, stop=stop)))
            lengths.append((len(ids) + most, prompt.place))
        self.samples = self.within_window(model, configs, lengths, self.too_long)

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> Found:
        """Answer prompts, those of about the same length together."""
        stops = {n: self._encoded[n].params.stop for n in samples}
        order = sorted(samples, key=lambda n: (stops[n], -len(self._encoded[n].ids)))
        alike = [list(own) for _, own in groupby(order, stops.__getitem__)]
        size = self.batch_size
        batches = [own[at : at + size] for own in alike for at in range(0, len(own), size)]
        for batch in batches:
            asked = [(self._encoded[n], sample_seed(seed, n)) for n in batch]
            prompts = [Prompt(own.ids, replace(own.params, seed=drawn)) for own, drawn in asked]
            for number, answers in enumerate(answer_batch(model, configs, prompts, seed)):
                found = zip(batch, answers, strict=True)
                yield number, {n: self.result(n, answer) for n, answer in found}
