"""What commands print: text, tables, progress."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import nn
from transformers import PreTrainedModel

from h2okv.console import format_bytes
from h2okv.evaluation.streaming import Step, Stream


class BenchProgress:
    """One step for every sample; drawn only where stderr is a terminal."""

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


LONG_PROMPT = 512


class PrefillProgress:
    """Shows on stderr how many layers have read the prompt, then vanishes."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_tokens: int,
        wanted: bool,
        chunk: int | None = None,
    ) -> None:
        self._layers = decoder_layers(model)
        self._steps = len(self._layers) * math.ceil(prompt_tokens / (chunk or prompt_tokens))
        shown = wanted and prompt_tokens >= LONG_PROMPT and sys.stderr.isatty() and self._layers
        self._text = f"reading {prompt_tokens} tokens"
        self._progress: Progress | None = _bar() if shown else None
        self._hooks: list[Any] = []

    def __enter__(self) -> PrefillProgress:
        """Starts the bar."""
        if self._progress is not None:
            progress = self._progress
            task = progress.add_task(self._text, total=self._steps)
            self._hooks = [
                layer.register_forward_hook(lambda *_: progress.advance(task))
                for layer in self._layers
            ]
            progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the bar, whatever happened."""
        self.close()

    def close(self) -> None:
        """Removes the bar and the hooks; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Finds a model's decoder layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


_REFRESH_SECONDS = 0.2


class StreamProgress:
    """A live line: position, tokens in a second, the cache's bytes, perplexity.

    It is drawn only where stderr is a terminal.
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
    """Writes a perplexity for people."""
    return f"{math.exp(nll):.4g}" if nll < 600 else "beyond 1e260"


class Interrupt:
    """Notes the first Ctrl-C and lets the second one strike.

    A `KeyboardInterrupt` in the middle of a forward would leave layers that have seen the token
    and layers that have not. So the first Ctrl-C only sets `requested`, which is looked at
    between two forwards; the second one, for a forward that takes too long, raises.

    Inside the ``with`` block SIGINT belongs to this object, except in another thread than the main
    one, and where whoever started the process had it ignore Ctrl-C.
    """

    def __init__(self, module: nn.Module) -> None:
        self.requested = False
        self.in_forward = False
        self._may_force = True
        self._module = module
        self._hooks: list[Any] = []
        self._before: Any = signal.getsignal(signal.SIGINT)
        # None: its handler was not set from Python and could not be given back.
        self._installs = (
            threading.current_thread() is threading.main_thread()
            and self._before not in (signal.SIG_IGN, None)
        )

    def __enter__(self) -> Interrupt:
        """Takes SIGINT over."""
        self._hooks = [
            self._module.register_forward_pre_hook(self._begin),
            self._module.register_forward_hook(self._end),
        ]
        if self._installs:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives SIGINT back."""
        for hook in self._hooks:
            hook.remove()
        if self._installs:
            signal.signal(signal.SIGINT, self._before)

    def settle(self) -> None:
        """Says that no forward will follow: what is left to do is short and must not be cut."""
        self._may_force = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self._may_force:
            raise KeyboardInterrupt
        self.requested = True

    def _begin(self, *_: Any) -> None:
        self.in_forward = True

    def _end(self, *_: Any) -> None:
        self.in_forward = False
