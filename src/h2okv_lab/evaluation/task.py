"""What an evaluation task is, and the tasks whose samples are prompts to be answered."""

from __future__ import annotations

import hashlib
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any, ClassVar, Literal, NamedTuple

from h2okv.config import CacheConfig
from h2okv.console import check_minimum
from h2okv.engine.sampling_params import SamplingParams
from h2okv_lab.evaluation.model import Answer, ModelUnderTest, Prompt, answer_batch

Configs = Sequence[CacheConfig]
Result = Mapping[str, Any]  # of one sample: JSON values by name
CacheResults = Iterator[tuple[int, dict[int, Result]]]  # (index of a cache, results by sample)
TooLong = Literal["refuse", "skip"]


class Score(NamedTuple):
    """One figure; its standard error is ``None`` where it is not a mean over samples."""

    value: float
    stderr: float | None = None


@dataclass(eq=False)
class Task(ABC):
    """An evaluation task; its fields are its options, in experiment files too."""

    name: str  # in tables
    samples: Sequence[int] = field(init=False)  # sample numbers, set by `prepare`
    metrics: ClassVar[tuple[str, ...]]  # the names of its scores
    headline: ClassVar[str] = ""  # the metric in plots; the first one if empty

    @property
    def columns(self) -> Mapping[str, Any]:
        """Columns that distinguish tasks of the same name."""
        return {}

    @property
    def label(self) -> str:
        """The name with the columns."""
        return ", ".join([self.name, *(f"{name} {value}" for name, value in self.columns.items())])

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Return everything its results depend on but the model, the cache and the seed."""

    @abstractmethod
    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        """Prepare the samples for a model, without loading its weights."""

    @abstractmethod
    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        """Evaluate samples with several caches, which may share forwards."""

    def within_window(
        self,
        model: ModelUnderTest,
        configs: Configs,
        lengths: Sequence[tuple[int, str]],  # of all samples: tokens with the answer's, location
        too_long: TooLong | None = None,  # None: refuse, with no option to skip
    ) -> list[int]:
        """Return the numbers of the samples within the context window."""
        numbers = list(range(len(lengths)))
        if too_long == "skip" and model.window is not None:
            numbers = [n for n in numbers if lengths[n][0] <= model.window]
            if not numbers:
                raise ValueError(
                    f"every sample is above the model's context window of {model.window} tokens"
                    f" (the shortest has {min(lengths)[0]}, its answer included); use"
                    " --cache positions=rolling"
                )
        for config, n in product(configs, numbers):
            tokens, location = lengths[n]
            reason = model.too_long(config, tokens)
            if reason is not None:
                skip = ", or --too-long skip" if too_long == "refuse" else ""
                raise ValueError(
                    f"{location} has up to {tokens} tokens with its answer; for the cache"
                    f" {config.label!r} {reason}{skip}"
                )
        return numbers

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Return the scores by metric; means over the samples unless a task overrides it."""
        return {name: mean(result[name] for result in results.values()) for name in self.metrics}

    def size(self, results: Mapping[int, Result]) -> int:
        """Return the number of samples behind the scores."""
        return len(results)

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """Return the rows of a more detailed table than `scores`; one row by default."""
        return [{name: score.value for name, score in self.scores(results).items()}]


def mean(values: Iterable[float]) -> Score:
    """Average a figure over samples."""
    numbers = [float(value) for value in values]
    if len(numbers) < 2:
        return Score(numbers[0])
    return Score(statistics.fmean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5)


@dataclass(frozen=True)
class TextPrompt:
    """A prompt before tokenization."""

    text: str
    max_new_tokens: int
    stops: tuple[str, ...]  # strings that end the answer
    location: str  # file and line, for messages
    references: tuple[str, ...] = ()  # reference answers


# The fields of `SamplingParams` that are options of a `GenerationTask`.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")


@dataclass(eq=False, kw_only=True)
class GenerationTask(Task):
    """Prompts to answer, each a sample; subclasses read them and score the answers."""

    batch_size: int = 8
    limit: int | None = None  # use the first samples only
    too_long: TooLong = "skip"  # how to treat samples above the context window
    max_new_tokens: int | None = None  # None: the sample's own limit
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()  # in addition to those of the prompt
    prompts: Sequence[TextPrompt] = field(init=False)

    def __post_init__(self) -> None:
        check_minimum(
            batch_size=self.batch_size, limit=self.limit, max_new_tokens=self.max_new_tokens
        )
        self._params = SamplingParams(**{name: getattr(self, name) for name in SAMPLING})

    @abstractmethod
    def result(self, sample: int, answer: Answer) -> Result:
        """Score an answer."""

    def identity(self) -> Mapping[str, Any]:
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        for name in SAMPLING:
            value = getattr(self._params, name)
            # Leave out other defaults: result files from before these options stay valid.
            if name in ("temperature", "top_p") or value != getattr(SamplingParams, name):
                options[name] = value
        return options

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        self._encoded: list[Prompt] = []
        lengths: list[tuple[int, str]] = []
        for prompt in self.prompts[: self.limit]:
            limit = self.max_new_tokens or prompt.max_new_tokens
            ids = model.encode(prompt.text)
            stop = tuple(dict.fromkeys((*prompt.stops, *self.stop)))
            self._encoded.append(Prompt(ids, replace(self._params, max_tokens=limit, stop=stop)))
            lengths.append((len(ids) + limit, prompt.location))
        self.samples = self.within_window(model, configs, lengths, self.too_long)

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        """Answer prompts, batching those of similar length."""
        stops = {n: self._encoded[n].params.stop for n in samples}
        order = sorted(samples, key=lambda n: (stops[n], -len(self._encoded[n].ids)))
        alike = [list(group) for _, group in groupby(order, stops.__getitem__)]
        size = self.batch_size
        starts = ((group, start) for group in alike for start in range(0, len(group), size))
        for batch in (group[start : start + size] for group, start in starts):
            seeded = [(self._encoded[n], sample_seed(seed, n)) for n in batch]
            prompts = [Prompt(p.ids, replace(p.params, seed=own_seed)) for p, own_seed in seeded]
            for number, answers in enumerate(answer_batch(model, configs, prompts, seed)):
                scored = zip(batch, answers, strict=True)
                yield number, {n: self.result(n, answer) for n, answer in scored}


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of one sample of a run."""
    digest = hashlib.sha256(f"{seed} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
