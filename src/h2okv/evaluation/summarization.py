"""Summaries of articles, scored by ROUGE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2okv.evaluation.answering import Answer
from h2okv.evaluation.articles import Article
from h2okv.evaluation.decoding import Decoding
from h2okv.evaluation.digest import digest
from h2okv.evaluation.generation_task import BatchOptions, GenerationTask, TextPrompt
from h2okv.evaluation.result_file import Result
from h2okv.evaluation.rouge import METRICS, Rouge
from h2okv.evaluation.task import Score, mean


class Summarization(GenerationTask):
    """A model summarizes articles; as in H2O's section 5 and the llama recipe's table.

    Args:
        name: What tables call it.
        articles: What to summarize.
        options: How prompts are run.
        decoding: How tokens are chosen.
        stemmer: Whether ROUGE compares stems.
    """

    metrics = METRICS
    headline = "rouge2"

    def __init__(
        self,
        name: str,
        articles: Sequence[Article],
        options: BatchOptions,
        decoding: Decoding,
        stemmer: bool = False,
    ) -> None:
        super().__init__(options, decoding)
        self.name = name
        self.articles = articles
        self._rouge = Rouge(stemmer)
        self._stemmer = stemmer

    def identity(self) -> Mapping[str, Any]:
        """Names the articles and how they are summarized and scored."""
        content = repr([(a.prompt.text, a.prompt.stops, a.references) for a in self.articles])
        return {
            "data": digest(content),
            "max_new_tokens": self.options.max_new_tokens,
            "temperature": self.decoding.temperature,
            "top_p": self.decoding.top_p,
            "stemmer": self._stemmer,
        }

    def prompts(self) -> Sequence[TextPrompt]:
        """Returns the articles' prompts."""
        return [article.prompt for article in self.articles]

    def result(self, sample: int, answer: Answer) -> Result:
        """Scores a summary."""
        scores = self._rouge.f_scores(self.articles[sample].references, answer.text)
        return {**scores, "tokens": answer.tokens, "text": answer.text}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Averages ROUGE over the articles."""
        return {name: mean(results, name) for name in METRICS}
