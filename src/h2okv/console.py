"""Output for a person at a terminal, and Ctrl-C."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from types import FrameType
from typing import Any

BAD_INPUT = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # what shells report of a command that SIGPIPE ended

_LIBRARIES = ("h2okv", "transformers", "torch")


def install_hint(extra: str) -> str:
    """Return how to install an extra; the package is on no index, so pip does not know its name."""
    return f"in the clone of h2okv: pip install '.[{extra}]'"


def optional(module: str, feature: str, extra: str = "eval") -> Any:
    """Import a module of an extra; raise ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("PIL", "Pillow")
        raise ValueError(
            f"{package} is not installed, which {feature} needs; {install_hint(extra)}"
        ) from error


class OutputClosedError(ValueError):
    """Stdout cannot be written: its reader has closed it, or the disk is full."""


def write_text(text: str) -> None:
    """Write text to stdout and flush it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise output_closed(error) from error


def output_closed(error: OSError) -> OutputClosedError:
    """Return what an error of stdout means for a person."""
    is_closed = isinstance(error, BrokenPipeError)
    problem = "was closed by its reader" if is_closed else f"has an error ({error.strerror})"
    remedy = "so the remaining text is lost; write to a file with room, or read it to the end"
    return OutputClosedError(f"the output {problem}, {remedy}")


def write_json(values: object) -> None:
    """Write one JSON object as a line."""
    write_text(json.dumps(values, allow_nan=False) + "\n")


def write_remark(line: str) -> None:
    """Write a line to stderr, which keeps piped output free of it."""
    print(line, file=sys.stderr)


def warn(message: str) -> None:
    """Warn, at the line of the user's code from which a call into libraries led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def format_bytes(count: int) -> str:
    """Format a number of bytes for people, in powers of 1024."""
    power = min(4, max(count.bit_length() - 1, 0) // 10)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{count / 1024**power:.{min(power, 1)}f} {unit}"


def format_number(value: float) -> str:
    """Format a number: three digits of a small one, all before the point of a large one."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[str] = ()
) -> str:
    """Format a table as text; a heading may have several lines."""
    upwards = (reversed(heading.split("\n")) for heading in headings)
    header = [*zip_longest(*upwards, fillvalue="")][::-1]
    lines: list[Sequence[str]] = [*header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if headings:
        lines.insert(len(header), ["-" * width for width in widths])
    aligns = [str.rjust if heading not in left else str.ljust for heading in headings]
    text = ""
    for line in lines:
        cells = zip(line, widths, aligns or [str.ljust] * len(line), strict=True)
        text += "  ".join(align(cell, width) for cell, width, align in cells).rstrip() + "\n"
    return text


def format_duration(seconds: float) -> str:
    """Format a time for people."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"


class Progress:
    """A progress bar on stderr, drawn only on a terminal and removed at the end.

    With `line_seconds`, there is a line at such intervals where there is no terminal.
    """

    def __init__(
        self,
        description: str,
        total: float | None = None,
        unit: str = "",
        *,
        shown: bool = True,
        line_seconds: float | None = None,
    ) -> None:
        self._unit, self._description, self._total = unit, description, total
        self.is_drawn = shown and sys.stderr.isatty()
        self._line_seconds = line_seconds if shown and not self.is_drawn else None
        self._begun = self._last_line = time.monotonic()
        if self.is_drawn:
            self._bar = _make_bar()
            self._bar.add_task(description, total=total, count="", note="")

    def __enter__(self) -> Progress:
        if self.is_drawn:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar; a second call does nothing."""
        if self.is_drawn:
            self._bar.stop()
        self.is_drawn = False

    def advance(self, n: float = 1, note: str = "") -> None:
        """Advance by `n`; a note stays after the count until the next one replaces it."""
        if self.is_drawn:
            self.update(self._bar.tasks[0].completed + n, note=note)

    def update(self, done: float, note: str = "") -> None:
        """Set the total done; a non-empty note replaces the last."""
        if self.is_drawn:
            task = self._bar.tasks[0]
            count, note = self._count(done, task.total), note or task.fields["note"]
            self._bar.update(task.id, completed=done, count=count, note=note)
        now = time.monotonic()
        if self._line_seconds is not None and now - self._last_line >= self._line_seconds:
            self._last_line = now
            line = f"{self._description}: {self._count(done, self._total)}"
            if self._total and done:
                left = (now - self._begun) * (self._total - done) / done
                line += f", about {format_duration(left)} left"
            write_remark(line)

    def _count(self, done: float, total: float | None) -> str:
        if not self._unit:
            return f"{100 * done / total:.0f} %" if total else ""
        if self._unit == "bytes" and total:
            return f"{format_bytes(int(done))} of {format_bytes(int(total))}"
        of_total = "" if total is None else f"/{total:,.0f}"
        return f"{done:,.0f}{of_total} {self._unit}"


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    shown = ("{task.description}", "{task.fields[count]}", "{task.fields[note]}", "left")
    description, count, note, left = (TextColumn(text, markup=False) for text in shown)
    columns = (description, BarColumn(bar_width=20), count, note, TimeElapsedColumn(), left)
    return RichProgress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # Text goes above the bar only if both share the terminal.
        redirect_stdout=sys.stdout.isatty(),
    )


class Interrupt:
    """Defers the first Ctrl-C; the second one raises.

    A `KeyboardInterrupt` in the middle of a forward would leave layers that have seen the token
    and layers that have not. So the first Ctrl-C only sets `requested`, which the caller checks
    between two forwards; the second one, for a forward that takes too long, raises.

    Inside the ``with`` block this object handles SIGINT, except outside the main thread and in a
    process that was started with Ctrl-C ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._may_force = True
        self._exit = ExitStack()

    def __enter__(self) -> Interrupt:
        before: Any = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        # None: the handler was not set from Python and could not be restored.
        if is_main and before not in (signal.SIG_IGN, None):
            self._exit.callback(signal.signal, signal.SIGINT, before)
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def settle(self) -> None:
        """Announce that no forward will follow, so that a second Ctrl-C no longer raises."""
        self._may_force = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self._may_force:
            raise KeyboardInterrupt
        self.requested = True
