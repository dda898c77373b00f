"""The text: training books in one archive, held-out books as files."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

SEPARATOR = "<|endoftext|>"
TRAIN_ARCHIVE = "books_train.txt.xz"
HELD_OUT_BOOKS = (
    "alice_in_wonderland.txt",
    "frankenstein.txt",
    "moby_dick.txt",
    "pride_and_prejudice.txt",
    "sherlock_holmes.txt",
    "tale_of_two_cities.txt",
    "war_and_peace.txt",
)

_LINE_WRAP = re.compile(r"(?<=\S)[ ]*\n[ ]*(?=\S)")


def read_training_books(folder: Path) -> list[str]:
    """Read the training books.

    Args:
        folder: The folder that holds `books_train.txt.xz`.

    Returns:
        One string for each book.
    """
    with lzma.open(folder / TRAIN_ARCHIVE, "rt", encoding="utf-8") as file:
        books = file.read().split(SEPARATOR)
    return [book.strip() for book in books if book.strip()]


def read_held_out_book(folder: Path, name: str) -> str:
    """Read a held-out book, its wrapped lines joined as in the training archive.

    Args:
        folder: The folder that holds the held-out books.
        name: One of `HELD_OUT_BOOKS`.

    Returns:
        The book, one line for each paragraph, an empty line between paragraphs.

    Raises:
        ValueError: If `name` is not a held-out book.
    """
    if name not in HELD_OUT_BOOKS:
        raise ValueError(f"name={name!r} is not a held-out book; choose from {HELD_OUT_BOOKS}")
    book = (folder / name).read_text(encoding="utf-8")
    return _LINE_WRAP.sub(" ", book).strip()
