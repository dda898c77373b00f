"""A needle in a haystack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from h2okv.config import CacheConfig
from h2okv.evaluation.generate import Prompt, answer_question
from h2okv.evaluation.model import ModelUnderTest
from h2okv.evaluation.task import (
    GREEDY,
    Compression,
    Length,
    Result,
    Score,
    SharingTask,
    check_counts,
    filter_by_length,
    mean,
)
from h2okv.evaluation.tasks.ruler import load_string_match
from h2okv.evaluation.tasks.summarization import Rouge
from h2okv.provenance import digest

_SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"', "\n")
_NAMES = (
    "Adelaide", "Barnaby", "Clement", "Dorothea", "Edmund", "Florence", "Gilbert", "Harriet",
    "Isabel", "Jasper", "Katherine", "Leopold", "Matilda", "Nicholas", "Ottilie", "Philip",
)  # fmt: skip
_CITIES = (
    "Vienna", "Lisbon", "Geneva", "Moscow", "Venice", "Dublin", "Naples", "Berlin", "Madrid",
    "Athens", "Rome", "Paris",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """What is hidden and how it is asked for; ``{name}`` and ``{answer}`` differ from try to try.

    Attributes:
        statement: The sentence that is hidden.
        question: What the text ends in.
        answer: The answer, if it is always the same one.
        max_new_tokens: The most tokens of an answer.
    """

    statement: str = "The city of {name} is {answer}."
    question: str = "\nThe city of {name} is"
    answer: str | None = None
    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        """Refuses a needle that does not hold its answer."""
        answer = "{answer}" if self.answer is None else self.answer
        if answer not in self.statement:
            raise ValueError(
                f"--needle {self.statement!r} does not hold the answer {answer!r}; give both"
                " --needle and --answer, the one with the other in it"
            )
        check_counts(max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True)
class Grid:
    """Where needles are hidden.

    Attributes:
        lengths: Tokens of the whole prompt.
        depths: Fractions of the text that stand before the needle.
        tries: Needles for each length and depth, each in another part of the text.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    tries: int = 1

    def __post_init__(self) -> None:
        """Refuses what is no grid."""
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if not values:
                raise ValueError(f"--{name} names nothing; give at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"--{name} names a value twice; give each once")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"--depths {depth:g} is out of range; give fractions from 0 to 1")
        check_counts(tries=self.tries)

    def places(self) -> list[tuple[int, float, int]]:
        """Lists length, depth and try of every sample."""
        return [
            (length, depth, number)
            for length in self.lengths
            for depth in self.depths
            for number in range(self.tries)
        ]


class NeedleTask(SharingTask):
    """Needles in a text."""

    metrics = ("string_match", "rouge1_recall")

    def __init__(
        self,
        name: str,
        text: str,
        grid: Grid,
        needle: Needle,
        compression: Compression = "query-agnostic",
        seed: int = 0,
    ) -> None:
        self.name = name
        self.columns = {"compression": compression}
        self.text, self.grid, self.needle = text, grid, needle
        self.compression = compression
        self.seed = seed
        self._match, self._rouge = load_string_match(), Rouge()
        self._encoded: list[tuple[list[int], list[int], str]] = []

    def identity(self) -> Mapping[str, Any]:
        """Names the text, the needle and its places."""
        return {"data": digest(self.text), **asdict(self.grid), **asdict(self.needle)}

    def prepare(self, model: ModelUnderTest, configs: Sequence[CacheConfig]) -> None:
        """Hides the needles."""
        ids = model.encode(self.text, special=False)
        opening = model.encode("")
        ends = [n + 1 for n, token in enumerate(ids) if _ends_sentence(model, token)]
        draw = random.Random(self.seed)
        self._encoded = []
        for length, depth, number in self.grid.places():
            words = {"name": draw.choice(_NAMES), "answer": draw.choice(_CITIES)}
            answer = self.needle.answer or words["answer"]
            statement = model.encode(f" {_filled(self.needle.statement, words)}", special=False)
            question = model.encode(_filled(self.needle.question, words), special=False)
            room = length - len(opening) - len(statement) - len(question)
            if room < 1:
                raise ValueError(
                    f"--lengths {length} has no room for the needle and the question; give"
                    f" {length - room + 1} or more"
                )
            if room > len(ids):
                raise ValueError(
                    f"the text has {len(ids)} tokens for this model, too few to hide a needle at"
                    f" --lengths {length}; give a longer text"
                )
            start = number * room % (len(ids) - room + 1)
            cut = _sentence_end(ends, start, start + round(depth * room), start + room)
            hay = [*ids[start:cut], *statement, *ids[cut : start + room]]
            self._encoded.append(([*opening, *hay], question, answer))
        most = self.needle.max_new_tokens
        lengths = [
            Length(length + most, f"a text of --lengths {length}") for length in self.grid.lengths
        ]
        filter_by_length(model, configs, lengths)

    def samples(self) -> Sequence[int]:
        """Returns the needles' numbers."""
        return range(len(self._encoded))

    def run_together(
        self,
        model: ModelUnderTest,
        configs: Sequence[CacheConfig],
        samples: Sequence[int],
        seed: int,
    ) -> Iterator[tuple[int, dict[int, Result]]]:
        """Asks for needles."""
        places = self.grid.places()
        for sample in samples:
            context, question, expected = self._encoded[sample]
            params = replace(GREEDY, max_tokens=self.needle.max_new_tokens, stop=("\n",))
            aware = self.compression == "query-aware"
            asked = Prompt(question, params)
            answers = answer_question(model, configs, context, asked, aware, seed)
            length, depth, _ = places[sample]
            for number, answer in enumerate(answers):
                result = {
                    "length": length,
                    "depth": depth,
                    "string_match": self._match([answer.text], [[expected]]),
                    "rouge1_recall": self._rouge.recall(expected, answer.text),
                    "text": answer.text,
                    "expected": expected,
                }
                yield number, {sample: result}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Averages over all needles."""
        return {name: mean(results, name) for name in self.metrics}

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """Makes a row for each length and depth."""
        rows = []
        for length in self.grid.lengths:
            for depth in self.grid.depths:
                here = {
                    n: r for n, r in results.items() if (r["length"], r["depth"]) == (length, depth)
                }
                scores = {name: mean(here, name).value for name in self.metrics}
                rows.append({"length": length, "depth": depth, **scores})
        return rows


def _filled(template: str, words: Mapping[str, str]) -> str:
    for name, word in words.items():
        template = template.replace(f"{{{name}}}", word)
    return template


def _ends_sentence(model: ModelUnderTest, token: int) -> bool:
    return model.decode([token]).rstrip(" ").endswith(_SENTENCE_ENDS)


def _sentence_end(ends: Sequence[int], start: int, wanted: int, stop: int) -> int:
    """The end of a sentence nearest to a place, or an end of the text if that is nearer."""
    return min(
        [start, stop, *(end for end in ends if start < end < stop)],
        key=lambda end: abs(end - wanted),
    )
