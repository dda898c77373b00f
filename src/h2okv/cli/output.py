"""Where text goes: results to stdout, remarks about them to stderr."""

from __future__ import annotations

import sys


def write_text(text: str) -> None:
    """Writes a piece of text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_heading(heading: str) -> None:
    """Writes a heading to stdout."""
    write_text(f"--- {heading} ---\n")


def write_summary(line: str) -> None:
    """Writes a line to stderr, so that a text piped on stays only text."""
    print(line, file=sys.stderr)


def discard(text: str) -> None:
    """Writes nothing."""
