"""Summaries of articles, scored by ROUGE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.generate import Answer
from h2okv.evaluation.task import BatchOptions, GenerationTask, Result, Score, TextPrompt, mean
from h2okv.provenance import digest
from h2okv.records import Record, read_jsonl, read_text_file

_STOPS = ("###",)
_MOST_TOKENS = 64
_MOST_TOKENS_OF_SEVERAL = 128
_MOST_TOKENS_OF_DOCUMENTS = 512
ONE_ARTICLE = "###\nArticle: {article}\n\nSummarize the above article in 3 sentences.\n"
"""The recipe's form of a prompt, for articles that come bare."""
SEVERAL_DOCUMENTS = "{article}\n\nA summary of the passages above in one page:\n"
_PLACE = "{article}"


@dataclass(frozen=True)
class Article:
    """One article with its prompt.

    Attributes:
        prompt: What the model goes on from.
        references: Summaries that people wrote.
    """

    prompt: TextPrompt
    references: tuple[str, ...]


def read_articles(
    path: Path, references: Path | None = None, template: str | None = None
) -> list[Article]:
    """Reads articles.

    One of these forms:

    - the recipe's: JSONL with ``article`` (the whole prompt), ``summary_gt``, and if they like
      ``stop`` and ``max_tokens``;
    - LongBench's: JSONL with ``context`` and ``answers``;
    - two files: a text with one article on each line, and JSONL with ``refs``.
    """
    if template is not None and _PLACE not in template:
        raise ValueError(f"--template {template!r} has no {_PLACE} to put the article in; add it")
    if references is not None:
        return _pairs(path, references, template or ONE_ARTICLE)
    wanted = "an object with article and summary_gt, or with context and answers"
    lines = read_jsonl(path, wanted)
    return [_article(line, template, wanted) for line in lines]


def _article(line: Record, template: str | None, wanted: str) -> Article:
    if "article" in line.fields:
        if template is not None:
            raise ValueError(
                f"{line.place}: field article is a whole prompt already; leave out --template"
            )
        stops = line.texts("stop") if line.fields.get("stop") is not None else ()
        most = line.number("max_tokens", _MOST_TOKENS)
        prompt = TextPrompt(line.text("article"), most, stops, line.place)
        return Article(prompt, line.texts("summary_gt"))
    if "context" in line.fields:
        text = (template or SEVERAL_DOCUMENTS).replace(_PLACE, line.text("context").strip())
        prompt = TextPrompt(text, _MOST_TOKENS_OF_DOCUMENTS, (), line.place)
        return Article(prompt, line.texts("answers"))
    raise ValueError(f"{line.place} has neither field article nor field context; give {wanted}")


def _pairs(path: Path, references: Path, template: str) -> list[Article]:
    texts = read_text_file(path).rstrip("\n").split("\n")
    lines = read_jsonl(references, "an object with refs")
    if len(texts) != len(lines):
        raise ValueError(
            f"'{path}' has {len(texts)} lines and '{references}' has {len(lines)}; each article"
            " needs its line of references"
        )
    found = []
    for number, (text, line) in enumerate(zip(texts, lines, strict=True), start=1):
        where = f"line {number} of '{path}'"
        if not text.strip():
            raise ValueError(f"{where} is empty; give one article on each line")
        prompt = template.replace(_PLACE, text.strip())
        of_article = TextPrompt(prompt, _MOST_TOKENS_OF_SEVERAL, _STOPS, where)
        found.append(Article(of_article, line.texts("refs")))
    return found


METRICS = ("rouge1", "rouge2", "rougeL")


class Rouge:
    """ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) of a text against references."""

    def __init__(self, stemmer: bool = False) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise ValueError(
                "ROUGE needs rouge-score, which is not installed; pip install 'h2okv[eval]'"
            ) from error
        self._scorer: Any = RougeScorer(list(METRICS), use_stemmer=stemmer)

    def f_scores(self, references: Sequence[str], text: str) -> dict[str, float]:
        """Scores a text."""
        scores = self._scorer.score_multi(list(references), text)
        return {name: float(scores[name].fmeasure) for name in METRICS}

    def recall(self, reference: str, text: str) -> float:
        """Returns the share of a reference's words that a text has: ROUGE-1 recall, 0 to 1."""
        return float(self._scorer.score(reference, text)["rouge1"].recall)


class Summarization(GenerationTask):
    """A model summarizes articles; as in H2O's section 5 and the llama recipe's table."""

    metrics = METRICS
    headline = "rouge2"

    def __init__(
        self,
        name: str,
        articles: Sequence[Article],
        options: BatchOptions,
        params: SamplingParams,
        stemmer: bool = False,
    ) -> None:
        super().__init__(options, params)
        self.name = name
        self.articles = articles
        self._rouge = Rouge(stemmer)
        self._stemmer = stemmer

    def identity(self) -> Mapping[str, Any]:
        """Names the articles and how they are summarized and scored."""
        content = repr([(a.prompt.text, a.prompt.stops, a.references) for a in self.articles])
        return {"data": digest(content), **super().identity(), "stemmer": self._stemmer}

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
