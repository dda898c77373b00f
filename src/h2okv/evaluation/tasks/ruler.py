"""RULER-style recall."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
    TooLong,
    check_counts,
    filter_by_length,
    mean,
)
from h2okv.provenance import digest
from h2okv.records import read_jsonl

MOST_TOKENS = 128
"""What RULER (arXiv 2404.06654) allows an answer of its needle tasks."""


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Attributes:
        context: The text.
        question: What is asked, with the line end before it.
        answers: What must stand in the answer.
        place: The sample, for messages.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    place: str


def read_ruler(path: Path) -> list[Question]:
    """Reads a file of RULER (arXiv 2404.06654), as its scripts write it."""
    questions = []
    for line in read_jsonl(path, "an object with input and outputs"):
        context, end, question = line.text("input").rpartition("\n")
        if not context.strip() or not question.strip():
            raise ValueError(
                f"{line.place}: field input has no last line that asks about the text before it;"
                " give RULER's form"
            )
        questions.append(Question(context, end + question, line.texts("outputs"), line.place))
    return questions


class Recall(SharingTask):
    """Questions about long texts, each with a cache of its own."""

    metrics = ("string_match",)

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        compression: Compression,
        limit: int | None = None,
        too_long: TooLong = "refuse",
        max_new_tokens: int = MOST_TOKENS,
    ) -> None:
        check_counts(limit=limit, max_new_tokens=max_new_tokens)
        self.name = name
        self.columns = {"compression": compression}
        self.questions = questions[:limit]
        self.compression = compression
        self.too_long = too_long
        self.max_new_tokens = max_new_tokens
        self._match = load_string_match()
        self._all = questions
        self._encoded: list[tuple[list[int], list[int]]] = []
        self._samples: Sequence[int] = ()

    def identity(self) -> Mapping[str, Any]:
        """Names the questions and how they are asked."""
        content = repr([(q.context, q.question, q.answers) for q in self._all])
        return {"data": digest(content), "max_new_tokens": self.max_new_tokens}

    def prepare(self, model: ModelUnderTest, configs: Sequence[CacheConfig]) -> None:
        """Makes texts and questions tokens, each on its own, so that both ways read the same."""
        self._encoded = [
            (model.encode(q.context), model.encode(q.question, special=False))
            for q in self.questions
        ]
        lengths = [
            Length(len(context) + len(question) + self.max_new_tokens, q.place)
            for (context, question), q in zip(self._encoded, self.questions, strict=True)
        ]
        self._samples = filter_by_length(model, configs, lengths, self.too_long)

    def samples(self) -> Sequence[int]:
        """Returns the numbers of the questions that are asked."""
        return self._samples

    def run_together(
        self,
        model: ModelUnderTest,
        configs: Sequence[CacheConfig],
        samples: Sequence[int],
        seed: int,
    ) -> Iterator[tuple[int, dict[int, Result]]]:
        """Asks questions."""
        for sample in samples:
            context, question = self._encoded[sample]
            params = replace(GREEDY, max_tokens=self.max_new_tokens, stop=("\n",))
            aware = self.compression == "query-aware"
            asked = Prompt(question, params)
            expected = self.questions[sample].answers
            answers = answer_question(model, configs, context, asked, aware, seed)
            for number, answer in enumerate(answers):
                score = self._match([answer.text], [list(expected)])
                result = {"string_match": score, "text": answer.text, "expected": expected}
                yield number, {sample: result}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Averages RULER's score over the questions."""
        return {"string_match": mean(results, "string_match")}


def load_string_match() -> Callable[[list[str], list[list[str]]], float]:
    """Finds RULER's score in lm-evaluation-harness."""
    try:
        from lm_eval.tasks.ruler.common_utils import string_match_all
    except ImportError as error:
        raise ValueError(
            "recall is scored by lm-evaluation-harness, which is not installed; pip install"
            " 'h2okv[eval]'"
        ) from error
    return string_match_all
