"""What a job shows of itself while it runs: a bar on stderr."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class BatchProgress:
    """Prompts finished, tokens in a second, time left; only where stderr is a terminal.

    Args:
        total: Prompts of the job.
        finished: Of these, finished by an earlier run.
        max_new_tokens: Tokens that a prompt takes at most, by which the bar moves on.
    """

    def __init__(self, total: int, finished: int, max_new_tokens: int) -> None:
        self._length = max_new_tokens
        self._start = time.perf_counter()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[prompts]} prompts"),
                TextColumn("{task.fields[speed]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task(
                "batch",
                total=total * max_new_tokens,
                completed=finished * max_new_tokens,
                prompts=f"{finished}/{total}",
                speed="",
            )
        self._total = total

    def __enter__(self) -> BatchProgress:
        """Starts the bar."""
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the bar, whatever happened."""
        if self._progress is not None:
            self._progress.stop()

    def update(self, finished: int, unfinished_tokens: int, num_tokens: int) -> None:
        """Draws the bar anew.

        Args:
            finished: Prompts, all in all.
            unfinished_tokens: Generated for prompts that are not finished.
            num_tokens: Generated in this run.
        """
        if self._progress is None:
            return
        speed = num_tokens / max(time.perf_counter() - self._start, 1e-9)
        self._progress.update(
            self._task,
            completed=finished * self._length + unfinished_tokens,
            prompts=f"{finished}/{self._total}",
            speed=f"{speed:,.1f} tokens/s",
        )


class StageProgress:
    """A bar for one long piece of work in bytes; only where stderr is a terminal.

    Args:
        description: What is done.
    """

    def __init__(self, description: str) -> None:
        self._progress = Progress(
            TextColumn(description),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> StageProgress:
        """Starts the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the bar."""
        self._progress.stop()

    def show(self, done: int, total: int) -> None:
        """Shows how far it is."""
        self._progress.update(self._task, completed=done, total=total)
