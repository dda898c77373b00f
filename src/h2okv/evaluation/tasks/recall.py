"""Recall from long texts: needles that are hidden in one, and RULER's questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from h2okv.console import check_least, optional
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.model import ModelUnderTest, Prompt, answer_question
from h2okv.evaluation.task import Configs, Found, Result, Task, TooLong
from h2okv.evaluation.tasks.generation import load_rouge
from h2okv.provenance import digest
from h2okv.records import read_jsonl

Compression = Literal["query-aware", "query-agnostic"]
# Whether the cache is compressed with the question at hand, or before it is known.
COMPRESSIONS: tuple[Compression, ...] = ("query-aware", "query-agnostic")

_SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"', "\n")
_NAMES = (
    "Adelaide", "Barnaby", "Clement", "Dorothea", "Edmund", "Florence", "Gilbert", "Harriet",
    "Isabel", "Jasper", "Katherine", "Leopold", "Matilda", "Nicholas", "Ottilie", "Philip",
)  # fmt: skip
_CITIES = (
    "Vienna", "Lisbon", "Geneva", "Moscow", "Venice", "Dublin", "Naples", "Berlin", "Madrid",
    "Athens", "Rome", "Paris",
)  # fmt: skip


@dataclass(eq=False, kw_only=True)
class QuestionTask(Task):
    """Questions about long texts, each with a cache of its own, scored by RULER's rule."""

    compression: Compression = "query-agnostic"
    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        check_least(max_new_tokens=self.max_new_tokens)
        scores = optional("lm_eval.tasks.ruler.common_utils", "recall")
        self._match: Callable[[list[str], list[list[str]]], float] = scores.string_match_all
        # Context and question, each tokenized on its own so that both ways read the same; the
        # answers; and what stands beside the scores.
        self._asked: list[tuple[list[int], list[int], Sequence[str], dict[str, Any]]] = []

    @property
    def columns(self) -> Mapping[str, Any]:
        return {"compression": self.compression}

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> Found:
        params = SamplingParams(temperature=0, max_tokens=self.max_new_tokens, stop=("\n",))
        aware = self.compression == "query-aware"
        for sample in samples:
            context, question, expected, beside = self._asked[sample]
            asked = Prompt(question, params)
            answers = answer_question(model, configs, context, asked, aware, seed)
            for number, (text, _) in enumerate(answers):
                yield number, {sample: {**beside, **self.judge(text, expected), "text": text}}

    def judge(self, text: str, answers: Sequence[str]) -> dict[str, float]:
        return {"string_match": self._match([text], [list(answers)])}


class Question(NamedTuple):
    """A question about a text, with the line end before it; its place is for messages."""

    context: str
    question: str
    answers: tuple[str, ...]
    place: str


def read_ruler(path: Path) -> list[Question]:
    """Read a file of RULER (arXiv 2404.06654), as its scripts write it."""
    questions = []
    for line in read_jsonl(path, "an object with input and outputs"):
        context, end, question = line.text("input").rpartition("\n")
        if not context.strip() or not question.strip():
            raise ValueError(f"{line.place}: field input has no last line; give RULER's form")
        questions.append(Question(context, end + question, line.texts("outputs"), line.place))
    return questions


@dataclass(eq=False)
class Recall(QuestionTask):
    """RULER's questions (arXiv 2404.06654)."""

    input: Path  # RULER's JSONL
    max_new_tokens: int = field(default=128, kw_only=True)  # RULER's own for its needles
    limit: int | None = None
    too_long: TooLong = "skip"
    metrics = ("string_match",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(limit=self.limit)
        self.questions = read_ruler(self.input)

    def identity(self) -> Mapping[str, Any]:
        content = repr([question[:3] for question in self.questions])
        return {"data": digest(content), "max_new_tokens": self.max_new_tokens}

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        self._asked = []
        lengths: list[tuple[int, str]] = []
        for text, question, answers, place in self.questions[: self.limit]:
            ids, asked = model.encode(text), model.encode(question, special=False)
            self._asked.append((ids, asked, answers, {"expected": answers}))
            lengths.append((len(ids) + len(asked) + self.max_new_tokens, place))
        self.samples = self.within_window(model, configs, lengths, self.too_long)


@dataclass(eq=False)
class NeedleTask(QuestionTask):
    """A needle in a haystack: a sentence at some depth of a text, asked for at its end."""

    text: str  # the haystack
    lengths: tuple[int, ...] = (512, 1024, 1536)  # tokens of the whole prompt
    depths: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 1)  # fractions of the text before the needle
    tries: int = 4  # for each length and depth, each in another part of the text
    statement: str = "The city of {name} is {answer}."
    question: str = "\nThe city of {name} is"
    answer: str | None = None  # if it is always the same one
    seed: int = 0  # of names and answers
    metrics = ("string_match", "rouge1_recall")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if not values:
                raise ValueError(f"--{name} names nothing; give at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"--{name} names a value twice; give each once")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"--depths {depth:g} is out of range; give fractions from 0 to 1")
        check_least(tries=self.tries)
        answer = "{answer}" if self.answer is None else self.answer
        if answer not in self.statement:
            raise ValueError(
                f"--needle {self.statement!r} does not hold the answer {answer!r}; give both"
                " --needle and --answer, the one with the other in it"
            )
        self._rouge = load_rouge()

    def identity(self) -> Mapping[str, Any]:
        names = ("lengths", "depths", "tries", "statement", "question", "answer", "max_new_tokens")
        return {"data": digest(self.text), **{name: getattr(self, name) for name in names}}

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        ids, opening = model.encode(self.text, special=False), model.encode("")
        ends = [
            n
            for n, token in enumerate(ids, start=1)
            if model.decode([token]).rstrip(" ").endswith(_SENTENCE_ENDS)
        ]
        draw = random.Random(self.seed)
        self._asked = []
        for length, depth, number in product(self.lengths, self.depths, range(self.tries)):
            name, city = draw.choice(_NAMES), draw.choice(_CITIES)
            statement, question = (
                model.encode(words.replace("{name}", name).replace("{answer}", city), special=False)
                for words in (f" {self.statement}", self.question)
            )
            room = length - len(opening) - len(statement) - len(question)
            self._check_room(length, room, len(ids))
            start = number * room % (len(ids) - room + 1)
            stop, wanted = start + room, start + round(depth * room)
            # The end of a sentence nearest to it, or an end of the text if that is nearer.
            places = [start, stop, *(end for end in ends if start < end < stop)]
            cut = min(places, key=lambda place: abs(place - wanted))
            context = [*opening, *ids[start:cut], *statement, *ids[cut:stop]]
            expected = self.answer or city
            beside = {"length": length, "depth": depth, "expected": expected}
            self._asked.append((context, question, [expected], beside))
        most = self.max_new_tokens
        lengths = [(length + most, f"a text of --lengths {length}") for length in self.lengths]
        self.within_window(model, configs, lengths)
        self.samples = range(len(self._asked))

    def _check_room(self, length: int, room: int, tokens: int) -> None:
        """Refuse a length with too little room for the text, or too much."""
        if room < 1:
            raise ValueError(
                f"--lengths {length} has no room for the needle and the question; give"
                f" {length - room + 1} or more"
            )
        if room > tokens:
            raise ValueError(
                f"the text has {tokens} tokens for this model, too few to hide a needle at"
                f" --lengths {length}; give a longer text"
            )

    def judge(self, text: str, answers: Sequence[str]) -> dict[str, float]:
        return {
            **super().judge(text, answers),
            "rouge1_recall": float(self._rouge.score(answers[0], text)["rouge1"].recall),
        }

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        cells: dict[tuple[int, float], dict[int, Result]] = {}
        for sample, result in results.items():
            cells.setdefault((result["length"], result["depth"]), {})[sample] = result
        return [
            {"length": length, "depth": depth, **super(NeedleTask, self).details(here)[0]}
            for (length, depth), here in cells.items()
        ]
