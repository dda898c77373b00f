"""What the package brings along: a small trained model, and texts to try and to measure with."""

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
    """Return the opening of "A Scandal in Bohemia" (1892), unknown to the bundled model."""
    return (_FOLDER / "sample_prompt.txt").read_text(encoding="utf-8")


def calibration_texts() -> tuple[str, ...]:
    """Return the texts that heads are measured on: a story, a program, a manual, a conversation.

    Each is longer than a window of `measure_layer_budgets`.
    """
    names = ("sample_prompt", "sample_code", "sample_manual", "sample_chat")
    return tuple((_FOLDER / f"{name}.txt").read_text(encoding="utf-8") for name in names)
