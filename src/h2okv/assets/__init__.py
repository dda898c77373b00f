"""What the package brings along: a small trained model and a text to try it on."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def bundled_model_path() -> Path:
    """Returns the folder of the bundled model, in the form that `from_pretrained` takes."""
    return _FOLDER / "books-llama"


def sample_article() -> str:
    """Returns a newspaper article of some 780 words, written for this package."""
    return (_FOLDER / "article.txt").read_text(encoding="utf-8")


def sample_prompt() -> str:
    """Returns the opening of a novel that the bundled model has not been trained on.

    It is some 2,600 words of "A Scandal in Bohemia" from "The Adventures of Sherlock Holmes" by
    Arthur Conan Doyle (1892, in the public domain), the wrapped lines of a paragraph joined. The
    caller cuts it to what a model's context holds.
    """
    return (_FOLDER / "sample_prompt.txt").read_text(encoding="utf-8")
