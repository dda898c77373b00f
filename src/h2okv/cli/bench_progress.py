"""The progress bar of a benchmark or an evaluation, on stderr."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class BenchProgress:
    """One step for every sample; drawn only where stderr is a terminal.

    Args:
        total: Samples to come.
    """

    def __init__(self, total: int) -> None:
        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(
            *columns,
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> BenchProgress:
        """Starts the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the bar, whatever happened."""
        self._progress.stop()

    def doing(self, text: str) -> None:
        """Says what runs now."""
        self._progress.update(self._task, description=text)

    def done(self, text: str, count: int = 1) -> None:
        """Counts samples."""
        self._progress.update(self._task, advance=count, description=text)
