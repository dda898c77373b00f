"""Where text goes: results to stdout, remarks about them to stderr."""

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
    """Writes a piece of text to stdout at once.

    Args:
        text: The piece, line ends included.

    Raises:
        OutputClosedError: If nobody reads stdout any more.
    """
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
