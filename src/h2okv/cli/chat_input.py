"""What the user types, or a pipe brings: one entry at a time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_MARK = '"""'
_PROMPT = "> "
_MORE = "... "


@dataclass(frozen=True)
class Entry:
    """One turn or one command.

    Attributes:
        text: Without the last line's end.
        is_command: Whether it is a line that begins with a slash; a block never is.
    """

    text: str
    is_command: bool


class EntryReader:
    """Puts lines together: a line that ends in a backslash goes on, and so does a block.

    Args:
        read_line: Gives the next line without its end, None at the end of the input; gets what
            to show before it.
    """

    def __init__(self, read_line: Callable[[str], str | None]) -> None:
        self._read_line = read_line

    def read(self) -> Entry | None:
        """Reads the next entry.

        Returns:
            The entry; None at the end of the input.

        Raises:
            ValueError: If it is not text.
            KeyboardInterrupt: On Ctrl-C; what was typed of the entry is gone.
        """
        line = self._read_line(_PROMPT)
        if line is None:
            return None
        if line.strip() == BLOCK_MARK:
            return Entry(_checked("\n".join(self._block())), is_command=False)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._read_line(_MORE)
            if more is None:
                break
            lines.append(more)
        is_command = len(lines) == 1 and line.startswith("/") and "\n" not in line
        return Entry(_checked("\n".join(lines)), is_command)

    def _block(self) -> list[str]:
        """Lines up to the mark; the end of the input ends a block too, so that nothing is lost."""
        lines: list[str] = []
        while (line := self._read_line(_MORE)) is not None and line.strip() != BLOCK_MARK:
            lines.append(line)
        return lines


def entries_of_stdin() -> EntryReader:
    """Reads stdin: a terminal with line editing and history, anything else without a word.

    Returns:
        The reader.
    """
    if hasattr(sys.stdin, "reconfigure"):
        # Bytes that are no text are found out about in the entry that holds them.
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        return EntryReader(_read_pipe)
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  importing it gives input() editing and history
    return EntryReader(_read_terminal)


def _read_terminal(prompt: str) -> str | None:
    try:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()
    except EOFError:
        print(file=sys.stderr)  # what comes next shall not stand behind the prompt
        return None


def _read_pipe(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        where = f"line {line} of the input" if "\n" in text else "the line"
        raise ValueError(f"{where} is not UTF-8 text; convert it to UTF-8") from error
    return text
