"""`h2okv stream`: text without end on one cache, scored as it goes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from h2okv.cli.args import ModelOptions, cache_options, check_file, model_options
from h2okv.config import POSITIONS, CacheConfig, Positions
from h2okv.console import (
    INTERRUPTED,
    Interrupt,
    Progress,
    format_bytes,
    write_remark,
    write_text,
)

if TYPE_CHECKING:
    from h2okv.evaluation.stream_data import ConversationSource, TextSource
    from h2okv.evaluation.streaming import Setting, Step, Stream, StreamSettings
    from h2okv.integration.loading import Described

_NO_WINDOW = 8192
"""Stands for the context window of a model without one."""


@dataclass(frozen=True)
class _Files:
    """The files that a stream writes."""

    csv: Path | None
    plot: Path | None
    checkpoint: Path | None
    resume: bool

    def __post_init__(self) -> None:
        for name in ("csv", "plot", "checkpoint"):
            path = getattr(self, name)
            if path is not None:
                check_file(name, path)
        if self.plot is not None:
            from h2okv.evaluation.plots import check_plot

            check_plot(self.plot)
        if self.resume and self.checkpoint is None:
            raise ValueError("--resume needs --checkpoint FILE, the file to go on from")
        if not self.resume and self.checkpoint is not None and self.checkpoint.exists():
            raise ValueError(
                f"--checkpoint '{self.checkpoint}' exists already; add --resume to go on from it,"
                " or move it away to begin again"
            )


@cache_options(budget="25%", without=("positions", "prefill_chunk"))
@model_options()
def stream(
    cache: CacheConfig,
    model: ModelOptions,
    text: Annotated[Path | None, typer.Option(help="A text to read and score.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(help='JSONL of conversations: {"turns": [..]} or {"messages": [..]}.'),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Stop after this many tokens.", show_default="at the end")
    ] = None,
    positions: Annotated[
        str, typer.Option(help=f"auto (rolling, but original for full), {', '.join(POSITIONS)}.")
    ] = "auto",
    prefill_chunk: Annotated[
        int, typer.Option(help="Tokens of text read at once; 1 is the paper's Algorithm 1.")
    ] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    every: Annotated[int, typer.Option(help="Tokens between two rows.")] = 1000,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot them: .png, .svg or .pdf.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Save the cache and the place here, to be resumed.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Tokens between two checkpoints.")] = 10_000,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from --checkpoint; --tokens may be larger.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed, for --policy random.")] = 0,
) -> int:
    """Stream an endless text or conversations through one cache, far past the context window.

    A text is scored token by token. Of conversations each question is answered, and answers that
    the file gives are read. Everything goes sample after sample on one cache that is never
    emptied. A budget in percent is of the context window.

    Examples:

        h2okv stream --text book.txt --tokens 100000 --csv h2o.csv --plot h2o.png

        h2okv stream --text book.txt --tokens 8000 --budget full --csv full.csv

        h2okv stream --input mt_bench.jsonl --checkpoint chats.safetensors

        h2okv stream --input mt_bench.jsonl --checkpoint chats.safetensors --resume
    """
    from h2okv.cache import H2OCache
    from h2okv.evaluation.streaming import Stream, StreamSettings

    settings = StreamSettings(prefill_chunk, every, tokens, max_new_tokens)
    if save_every < 1:
        raise ValueError(f"--save-every {save_every} is too few; give 1 or more")
    if (text is None) == (input is None):
        what = "both --text and --input are" if text else "neither --text nor --input is"
        raise ValueError(f"{what} given; give one of them")
    files = _Files(csv, plot, checkpoint, resume)
    described = model.describe()
    cache = _in_tokens(described, cache, positions).seeded(seed)
    # A bad budget shows before anything is read.
    made = H2OCache.from_config(described.config, cache)
    _check_room(described, cache, settings)
    source = _source(described, text, input)
    loaded = model.load(described)
    identity: dict[str, Setting] = {
        "policy": cache.policy, "heavy": cache.heavy, "recent": cache.recent, "sink": cache.sink,
        "positions": cache.positions, "seed": seed,
        "scoring": None if cache.scoring == "sum" else cache.scoring, "decay": cache.decay,
        "kv_bits": cache.kv_bits,
    }  # fmt: skip
    if files.resume and files.checkpoint is not None:
        running = Stream.resume(loaded, files.checkpoint, source, settings, identity)
    else:
        running = Stream(loaded, made, source, settings, identity)
    _note_short_text(source, settings)
    return _run(running, described, cache, files, save_every)


def _in_tokens(described: Described, cache: CacheConfig, positions: str) -> CacheConfig:
    """Settles fractions by the context window, for a stream has no end, and the positions."""
    if positions not in ("auto", *POSITIONS):
        known = ", ".join(("auto", *POSITIONS))
        raise ValueError(f"--positions {positions!r} is not known; choose from {known}")
    if positions == "auto":
        positions = "original" if cache.is_full else "rolling"
    tokens = cache.budget.resolve(described.context or _NO_WINDOW)
    return replace(
        cache, heavy=tokens.heavy, recent=tokens.recent, positions=cast(Positions, positions)
    )


def _source(
    described: Described, text: Path | None, conversations: Path | None
) -> TextSource | ConversationSource:
    from h2okv.evaluation.stream_data import ConversationSource, TextSource

    vocab_size = described.config.get_text_config().vocab_size
    if text is not None:
        return TextSource.of_file(text, described.tokenizer, vocab_size)
    assert conversations is not None
    return ConversationSource(conversations, described.tokenizer, vocab_size)


def _check_room(described: Described, cache: CacheConfig, settings: StreamSettings) -> None:
    """Refuses ranks past the context window now, not at the block that would reach them."""
    from h2okv.cache.validation import context_window

    held = int(cache.heavy) + int(cache.recent) + cache.sink
    window = context_window(described.config)
    if (
        cache.positions == "rolling"
        and window is not None
        and held + settings.prefill_chunk > window
    ):
        raise ValueError(
            f"a budget of {held} tokens and a --prefill-chunk of {settings.prefill_chunk} are more"
            f" than the context window of {window}; make --budget or --prefill-chunk smaller"
        )


def _note_short_text(source: TextSource | ConversationSource, settings: StreamSettings) -> None:
    from h2okv.evaluation.stream_data import TextSource

    wanted = settings.tokens
    if wanted is not None and isinstance(source, TextSource) and source.num_tokens < wanted:
        write_remark(f"note: the text has {source.num_tokens} tokens to read, not {wanted}")


def _run(
    running: Stream, described: Described, cache: CacheConfig, files: _Files, save_every: int
) -> int:
    """Runs the stream with everything around it, and tells how it ended."""
    from h2okv.evaluation.plots import plot_stream
    from h2okv.evaluation.stream_data import TextSource
    from h2okv.evaluation.streaming import StreamFile, run_stream

    source, state = running.source, running.state
    is_text = isinstance(source, TextSource)
    total = running.settings.tokens
    if isinstance(source, TextSource):
        total = source.num_tokens if total is None else min(total, source.num_tokens)
    rows = None
    if files.csv is not None:
        rows = StreamFile(files.csv, state.rows if files.resume else None)
    start = (time.perf_counter(), state.position)
    bar = Progress("streaming", total, "tokens")
    with Interrupt(running.model) as interrupt, bar as progress:

        def on_step(step: Step) -> None:
            if progress.is_drawn:
                progress.update(state.position, note=_live_note(running, *start))
            if step.answer is not None and not is_text:
                write_text(_answer(running, described, step.answer))

        try:
            ended = run_stream(
                running,
                rows=rows,
                checkpoint=files.checkpoint,
                save_every=save_every,
                should_stop=lambda: interrupt.requested,
                on_step=on_step,
            )
        except KeyboardInterrupt:  # the second one, which does not wait for the block
            ended = False
        finally:
            if rows is not None:
                rows.close()
    last = running.last_row() if ended else None
    drawn = [*state.rows, *([last] if last else [])]
    if files.plot is not None and drawn:
        title = f"{described.name}: {cache.label}"
        plot_stream(files.plot, drawn, described.context, title)
    write_remark(_summary(running))
    if not ended:
        write_remark(_how_to_resume(running, files))
    return 0 if ended else INTERRUPTED


def _answer(running: Stream, described: Described, answer: tuple[int, ...]) -> str:
    """An answer as text, under its place in the stream."""
    state = running.state
    heading = f"--- sample {state.sample + 1}, answer {state.segment + 1} ---\n"
    return heading + str(described.tokenizer.decode(list(answer), skip_special_tokens=True)) + "\n"


def _live_note(running: Stream, start: float, first: int) -> str:
    """Speed, memory and perplexity so far."""
    state = running.state
    speed = (state.position - first) / max(time.perf_counter() - start, 1e-9)
    parts = [f"{speed:,.0f} tokens/s", f"cache {format_bytes(running.cache.nbytes)}"]
    parts.append(f"perplexity {perplexity(state.total_nll / state.position)}")
    if state.rows:
        parts.append(f"last row {perplexity(state.rows[-1].nll)}")
    return " | ".join(parts)


def perplexity(nll: float) -> str:
    """Writes a perplexity for people."""
    return f"{math.exp(nll):.4g}" if nll < 600 else "beyond 1e260"


def _summary(running: Stream) -> str:
    state = running.state
    parts = [f"{state.position} tokens"]
    if state.position:
        parts.append(f"perplexity {perplexity(state.total_nll / state.position)}")
    if state.seconds:
        parts.append(f"{state.position / state.seconds:,.0f} tokens/s")
    parts.append(f"cache {format_bytes(running.cache.nbytes)}")
    from h2okv.engine.memory import resident_bytes

    resident = resident_bytes()
    if resident is not None:
        parts.append(f"process {format_bytes(resident)}")
    return " | ".join(parts)


def _how_to_resume(running: Stream, files: _Files) -> str:
    if files.checkpoint is None:
        return "stopped; with --checkpoint FILE a stream can be resumed"
    if not files.checkpoint.exists():
        return "stopped before the first checkpoint, so that there is nothing to resume"
    return (
        f"stopped at token {running.state.position}; continue with the same command and --resume"
        f" (the checkpoint is '{files.checkpoint}')"
    )
