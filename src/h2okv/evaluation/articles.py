"""Articles to summarize, in the three forms in which the field passes them on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h2okv.evaluation.generation_task import TextPrompt
from h2okv.evaluation.jsonl_file import JsonLine, read_objects
from h2okv.evaluation.text_file import read_text_file

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

    Args:
        path: The articles.
        references: The second file of the third form.
        template: A prompt with ``{article}`` in it, for forms that bring no prompt.

    Returns:
        The articles in their order.

    Raises:
        ValueError: If a file or a line is not what it should be, naming file, line and field.
    """
    if template is not None and _PLACE not in template:
        raise ValueError(f"--template {template!r} has no {_PLACE} to put the article in; add it")
    if references is not None:
        return _pairs(path, references, template or ONE_ARTICLE)
    wanted = "an object with article and summary_gt, or with context and answers"
    lines = read_objects(path, wanted)
    return [_article(line, template, wanted) for line in lines]


def _article(line: JsonLine, template: str | None, wanted: str) -> Article:
    if "article" in line.fields:
        if template is not None:
            raise ValueError(
                f"{line.where}: field article is a whole prompt already; leave out --template"
            )
        stops = line.texts("stop") if line.fields.get("stop") is not None else ()
        most = line.number("max_tokens", _MOST_TOKENS)
        prompt = TextPrompt(line.text("article"), most, stops, line.where)
        return Article(prompt, line.texts("summary_gt"))
    if "context" in line.fields:
        text = (template or SEVERAL_DOCUMENTS).replace(_PLACE, line.text("context").strip())
        prompt = TextPrompt(text, _MOST_TOKENS_OF_DOCUMENTS, (), line.where)
        return Article(prompt, line.texts("answers"))
    raise ValueError(f"{line.where} has neither field article nor field context; give {wanted}")


def _pairs(path: Path, references: Path, template: str) -> list[Article]:
    texts = read_text_file(path).rstrip("\n").split("\n")
    lines = read_objects(references, "an object with refs")
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
