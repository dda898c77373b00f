"""What the package says to a person at a terminal: text, remarks, sizes."""

from __future__ import annotations

import sys


class OutputClosedError(ValueError):
    """Whoever read stdout has gone away."""

    def __init__(self) -> None:
        super().__init__(
            "the output was closed by its reader, so the rest of the text is lost; write to a file"
            " or let the reader read to the end"
        )


def write_text(text: str) -> None:
    """Writes a piece of text to stdout at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosedError from error


def write_heading(heading: str) -> None:
    """Writes a heading to stdout."""
    write_text(f"--- {heading} ---\n")


def write_remark(line: str) -> None:
    """Writes a line to stderr, so that a text piped on stays only text."""
    print(line, file=sys.stderr)


def discard(text: str) -> None:
    """Writes nothing."""


BAD_INPUT = 2
INTERRUPTED = 130


def format_bytes(count: int) -> str:
    """Writes a number of bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
