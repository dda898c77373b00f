"""Generated texts: ROUGE of summaries, and the diversity of answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2okv.console import optional
from h2okv.provenance import digest
from h2okv.records import read_text_file
from h2okv_lab.evaluation.model import Answer
from h2okv_lab.evaluation.streaming import read_conversations
from h2okv_lab.evaluation.task import GenerationTask, Result, Score, TextPrompt, mean
from h2okv_lab.tables import Entry, check_minimum, read_jsonl

_TOKENS = 64
_TOKENS_OF_SEVERAL = 128
_TOKENS_OF_DOCUMENTS = 512
# The recipe's prompt for articles without one.
ONE_ARTICLE = "###\nArticle: {article}\n\nSummarize the above article in 3 sentences.\n"
SEVERAL_DOCUMENTS = "{article}\n\nA summary of the passages above in one page:\n"
_FIELD = "{article}"
_EXPECTED = "an object with article and summary_gt, or with context and answers"


def read_articles(
    path: Path, references: Path | None = None, template: str | None = None
) -> list[TextPrompt]:
    """Read articles in the recipe's format, in LongBench's, or one a line with their references."""
    if template is not None and _FIELD not in template:
        raise ValueError(f"template={template!r} has no {_FIELD} to put the article in; add it")
    if references is not None:
        return _pairs(path, references, template or ONE_ARTICLE)
    return [_article(line, template) for line in read_jsonl(path, _EXPECTED)]


def _article(line: Entry, template: str | None) -> TextPrompt:
    if "article" in line.fields:  # a complete prompt
        if template is not None:
            raise ValueError(
                f"{line.location}: field article is a whole prompt already; leave out template"
            )
        stops = line.texts("stop") if line.fields.get("stop") is not None else ()
        limit, text = line.number("max_tokens", _TOKENS), line.text("article")
        return TextPrompt(text, limit, stops, line.location, line.texts("summary_gt"))
    if "context" in line.fields:
        text = (template or SEVERAL_DOCUMENTS).replace(_FIELD, line.text("context").strip())
        return TextPrompt(text, _TOKENS_OF_DOCUMENTS, (), line.location, line.texts("answers"))
    raise ValueError(
        f"{line.location} has neither field article nor field context; give {_EXPECTED}"
    )


def _pairs(path: Path, references: Path, template: str) -> list[TextPrompt]:
    texts = read_text_file(path).rstrip("\n").split("\n")
    lines = read_jsonl(references, "an object with refs")
    if len(texts) != len(lines):
        raise ValueError(
            f"'{path}' has {len(texts)} lines and '{references}' has {len(lines)}; each article"
            " needs its line of references"
        )
    prompts = []
    for number, (text, line) in enumerate(zip(texts, lines, strict=True), start=1):
        location = f"line {number} of '{path}'"
        if not text.strip():
            raise ValueError(f"{location} is empty; give one article on each line")
        prompt, refs = template.replace(_FIELD, text.strip()), line.texts("refs")
        prompts.append(TextPrompt(prompt, _TOKENS_OF_SEVERAL, ("###",), location, refs))
    return prompts


ROUGE = ("rouge1", "rouge2", "rougeL")


def load_rouge(stemmer: bool = False) -> Any:
    """Return rouge-score's scorer of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004)."""
    return optional("rouge_score.rouge_scorer", "ROUGE").RougeScorer(list(ROUGE), stemmer)


@dataclass(eq=False)
class Summarization(GenerationTask):
    """Summaries of articles, as in H2O's section 5 and the llama recipe's table."""

    input: Path  # this and the next two fields: see `read_articles`
    references: Path | None = None
    template: str | None = None
    stemmer: bool = False  # compare stems of words
    metrics = ROUGE
    headline = "rouge2"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompts = read_articles(self.input, self.references, self.template)
        self._rouge = load_rouge(self.stemmer)

    def identity(self) -> Mapping[str, Any]:
        content = repr([(p.text, p.stops, p.references) for p in self.prompts])
        return {"data": digest(content), **super().identity(), "stemmer": self.stemmer}

    def result(self, sample: int, answer: Answer) -> Result:
        rouge = self._rouge.score_multi(list(self.prompts[sample].references), answer.text)
        scores = {name: float(rouge[name].fmeasure) for name in ROUGE}
        return {**scores, "tokens": answer.tokens, "text": answer.text}


@dataclass(eq=False)
class Diversity(GenerationTask):
    """Several answers to the first question of each conversation, compared with each other.

    Self-BLEU (Zhu et al., arXiv 1802.01886): each answer's BLEU with the others as references.
    """

    input: Path  # see `read_conversations`
    copies: int = 4  # answers to each question
    temperature: float = field(default=1.0, kw_only=True)
    metrics = ("self_bleu",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(2, copies=self.copies)
        if self._params.is_greedy:
            raise ValueError("temperature 0 gives the same answer each time; give 1, for example")
        self._questions = [
            TextPrompt(f"{conversation[0].content}\n", _TOKENS, (), f"line {n} of '{self.input}'")
            for n, conversation in enumerate(read_conversations(self.input), start=1)
        ]
        self.prompts = [question for question in self._questions for _ in range(self.copies)]
        self.limit = None if self.limit is None else self.limit * self.copies
        self._bleu = optional("sacrebleu.metrics", "Self-BLEU").BLEU(effective_order=True)

    def identity(self) -> Mapping[str, Any]:
        data = digest(repr([(p.text, p.stops) for p in self._questions]))
        return {"data": data, "copies": self.copies, **super().identity()}

    def result(self, sample: int, answer: Answer) -> Result:
        return {"prompt": sample // self.copies, "tokens": answer.tokens, "text": answer.text}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Average Self-BLEU over the prompts, 0 to 100."""
        answers: dict[int, list[str]] = {}
        for result in results.values():
            answers.setdefault(result["prompt"], []).append(result["text"])
        return {"self_bleu": mean(map(self._self_bleu, answers.values()))}

    def _self_bleu(self, texts: list[str]) -> float:
        others = ([*texts[:n], *texts[n + 1 :]] for n in range(len(texts)))
        pairs = zip(texts, others, strict=True)
        return statistics.fmean(self._bleu.sentence_score(*pair).score for pair in pairs)
