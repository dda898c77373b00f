"""What a stream shows of itself while it runs: one live line on stderr."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from h2okv.cli.report import format_bytes
from h2okv.evaluation.stream import Step, Stream

_REFRESH_SECONDS = 0.2


class StreamProgress:
    """A live line: position, tokens in a second, the cache's bytes, perplexity.

    It is drawn only where stderr is a terminal.

    Args:
        stream: What runs.
        total: Tokens to read; None if nobody knows.
    """

    def __init__(self, stream: Stream, total: int | None) -> None:
        self._stream = stream
        self._total = total
        self._start = (time.perf_counter(), stream.state.position)
        self._drawn = 0.0
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("tokens"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                # Answers go above the line if they share the terminal, else where stdout goes.
                redirect_stdout=sys.stdout.isatty(),
            )

    def __enter__(self) -> StreamProgress:
        """Starts the line."""
        if self._progress is not None:
            self._task = self._progress.add_task("", total=self._total, numbers="")
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the line, whatever happened."""
        if self._progress is not None:
            self._progress.stop()

    def update(self, step: Step) -> None:
        """Draws the line anew, a few times in a second at most."""
        now = time.perf_counter()
        if self._progress is None or now - self._drawn < _REFRESH_SECONDS:
            return
        self._drawn = now
        state, cache = self._stream.state, self._stream.cache
        speed = (state.position - self._start[1]) / max(now - self._start[0], 1e-9)
        parts = [f"{speed:,.0f} tokens/s", f"cache {format_bytes(cache.nbytes)}"]
        parts.append(f"perplexity {perplexity(state.total_nll / state.position)}")
        if state.rows:
            parts.append(f"last row {perplexity(state.rows[-1].nll)}")
        self._progress.update(self._task, completed=state.position, numbers=" | ".join(parts))


def perplexity(nll: float) -> str:
    """Writes a perplexity for people.

    Args:
        nll: Mean negative log-likelihood, in nats.

    Returns:
        Its exponential in a few digits.
    """
    return f"{math.exp(nll):.4g}" if nll < 600 else "beyond 1e260"
