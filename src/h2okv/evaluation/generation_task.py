"""Tasks in which a model goes on from prompts, in batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from h2okv.evaluation.answering import Answer, Prompt, answer_batch
from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.decoding import Decoding
from h2okv.evaluation.long_samples import Length, TooLong, fitting
from h2okv.evaluation.result_file import Result
from h2okv.evaluation.seeded_sampling import sample_seed
from h2okv.evaluation.subject import Subject
from h2okv.evaluation.task import Task


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
    """Prompts that a model answers, each sample one.

    Args:
        options: How they are run.
        decoding: How tokens are chosen.
    """

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
