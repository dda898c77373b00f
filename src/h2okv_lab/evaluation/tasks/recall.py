"""Recall from long texts: needles that are hidden in one, and RULER's questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from h2okv.console import optional
from h2okv.engine.sampling_params import SamplingParams
from h2okv.provenance import digest
from h2okv_lab.evaluation.model import ModelUnderTest, Prompt, answer_question
from h2okv_lab.evaluation.task import CacheResults, Configs, Result, Task, TooLong
from h2okv_lab.evaluation.tasks.generation import load_rouge
from h2okv_lab.tables import check_distinct, check_minimum, read_jsonl

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
    """Questions about long texts, each on a separate cache, scored by RULER's rule."""

    compression: Compression = "query-agnostic"
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ("\n",)  # strings that end an answer

    def __post_init__(self) -> None:
        check_minimum(max_new_tokens=self.max_new_tokens)
        scores = optional("lm_eval.tasks.ruler.common_utils", "recall")
        self._match: Callable[[list[str], list[list[str]]], float] = scores.string_match_all
        # Context and question, tokenized separately so that both compressions read the same tokens;
        # the answers; and further columns of the result.
        self._questions: list[tuple[list[int], list[int], Sequence[str], dict[str, Any]]] = []

    @property
    def columns(self) -> Mapping[str, Any]:
        return {"compression": self.compression}

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        params = SamplingParams(temperature=0, max_tokens=self.max_new_tokens, stop=self.stop)
        aware = self.compression == "query-aware"
        for sample in samples:
            context, question, expected, columns = self._questions[sample]
            prompt = Prompt(question, params)
            answers = answer_question(model, configs, context, prompt, aware, seed)
            for number, (text, _) in enumerate(answers):
                yield number, {sample: {**columns, **self.judge(text, expected), "text": text}}

    def judge(self, text: str, answers: Sequence[str]) -> dict[str, float]:
        return {"string_match": self._match([text], [list(answers)])}


class Question(NamedTuple):
    """A question about a text, with the line end before it; the location is for messages."""

    context: str
    question: str
    answers: tuple[str, ...]
    location: str


def read_ruler(path: Path) -> list[Question]:
    """Read a file of RULER (arXiv 2404.06654), as its scripts write it.

    The question is the field ``question``, with which the input ends, or else the last line.
    """
    questions = []
    for line in read_jsonl(path, "an object with input and outputs"):
        text = line.text("input")
        context, end, last = text.rpartition("\n")
        question = line.text("question") if "question" in line.fields else end + last
        context = text.removesuffix(question)
        if not context.strip() or not question.strip() or not text.endswith(question):
            raise ValueError(f"{line.location}: field input has no last line; give RULER's form")
        questions.append(Question(context, question, line.texts("outputs"), line.location))
    return questions


@dataclass(eq=False)
class Recall(QuestionTask):
    """RULER's questions (arXiv 2404.06654)."""

    input: Path  # RULER's JSONL
    max_new_tokens: int = field(default=128, kw_only=True)  # RULER's value for needles
    limit: int | None = None
    too_long: TooLong = "skip"
    match: Literal["all", "any"] = "all"  # answers that count; any for questions about documents
    metrics = ("string_match",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(limit=self.limit)
        self.questions = read_ruler(self.input)

    def identity(self) -> Mapping[str, Any]:
        content = repr([question[:3] for question in self.questions])
        options = {"match": self.match, "stop": list(self.stop)}
        return {"data": digest(content), "max_new_tokens": self.max_new_tokens, **options}

    def judge(self, text: str, answers: Sequence[str]) -> dict[str, float]:
        if self.match == "all":
            return super().judge(text, answers)
        return {"string_match": max(self._match([text], [[answer]]) for answer in answers)}

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        self._questions = []
        lengths: list[tuple[int, str]] = []
        for text, question, answers, location in self.questions[: self.limit]:
            ids, question_ids = model.encode(text), model.encode(question, special=False)
            self._questions.append((ids, question_ids, answers, {"expected": answers}))
            lengths.append((len(ids) + len(question_ids) + self.max_new_tokens, location))
        self.samples = self.within_window(model, configs, lengths, self.too_long)


@dataclass(eq=False)
class NeedleTask(QuestionTask):
    """A needle in a haystack: a sentence hidden in a text, and a question at its end."""

    text: str  # the haystack
    lengths: tuple[int, ...] = (512, 1024, 1536)  # tokens of the whole prompt
    depths: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 1)  # fractions of the text before the needle
    tries: int = 4  # per length and depth, each in a different part of the text
    statement: str = "The city of {name} is {answer}."
    question: str = "\nThe city of {name} is"
    answer: str | None = None  # a fixed answer; None for a random city
    seed: int = 0  # of names and answers
    metrics = ("string_match", "rouge1_recall")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(lengths=self.lengths, depths=self.depths)
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"--depths must be fractions from 0 to 1, got {depth:g}")
        check_minimum(tries=self.tries)
        answer = "{answer}" if self.answer is None else self.answer
        if answer not in self.statement:
            raise ValueError(
                f"--needle {self.statement!r} must contain the answer {answer!r}; give both"
                " --needle and --answer"
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
        rng = random.Random(self.seed)
        self._questions = []
        for length, depth, number in product(self.lengths, self.depths, range(self.tries)):
            name, city = rng.choice(_NAMES), rng.choice(_CITIES)
            templates = (f" {self.statement}", self.question)
            texts = (t.replace("{name}", name).replace("{answer}", city) for t in templates)
            statement, question = (model.encode(text, special=False) for text in texts)
            room = length - len(opening) - len(statement) - len(question)
            self._check_room(length, room, len(ids))
            start = number * room % (len(ids) - room + 1)
            stop, target = start + room, start + round(depth * room)
            # Hide the needle at the nearest end of a sentence, or at an end of the text.
            cuts = [start, stop, *(end for end in ends if start < end < stop)]
            cut = min(cuts, key=lambda cut: abs(cut - target))
            context = [*opening, *ids[start:cut], *statement, *ids[cut:stop]]
            expected = self.answer or city
            columns = {"length": length, "depth": depth, "expected": expected}
            self._questions.append((context, question, [expected], columns))
        new = self.max_new_tokens
        lengths = [(length + new, f"a text of --lengths {length}") for length in self.lengths]
        self.within_window(model, configs, lengths)
        self.samples = range(len(self._questions))

    def _check_room(self, length: int, room: int, tokens: int) -> None:
        """Raise ValueError for a length that leaves too little room for the text, or too much."""
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
            {"length": length, "depth": depth, **super(NeedleTask, self).details(group)[0]}
            for (length, depth), group in cells.items()
        ]
