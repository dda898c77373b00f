"""`h2okv stream`: text without end on one cache, scored as it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from h2okv.cli import args
from h2okv.cli.args import JSON, ModelOptions, option
from h2okv.config import POSITIONS, CacheConfig
from h2okv.console import (
    INTERRUPTED,
    Interrupt,
    Progress,
    check_least,
    format_bytes,
    write_json,
    write_remark,
    write_text,
)
from h2okv.plots import check_plot
from h2okv.records import read_text_file

if TYPE_CHECKING:
    from h2okv.evaluation.stream_data import ConversationSource, TextSource
    from h2okv.evaluation.streaming import Setting, Step, Stream
    from h2okv.integration.loading import Described

_NO_WINDOW = 8192
"""Stands for the context window of a model without one."""


@dataclass(frozen=True)
class _Files:
    csv: Path | None
    plot: Path | None
    checkpoint: Path | None
    resume: bool

    def __post_init__(self) -> None:
        for name in ("csv", "plot", "checkpoint"):
            args.check_file(name, getattr(self, name))
        check_plot(self.plot)
        if self.resume and self.checkpoint is None:
            raise ValueError("--resume needs --checkpoint FILE, the file to go on from")
        if not self.resume and self.checkpoint is not None and self.checkpoint.exists():
            raise ValueError(f"'{self.checkpoint}' exists already; add --resume, or move it away")


@args.cache_options("25%", positions="original", prefill_chunk=None)
@args.model_options()
def stream(
    cache: CacheConfig,
    model: ModelOptions,
    text: Path | None = option(None, "A text to read and score."),
    input: Path | None = option(None, 'JSONL of conversations: {"turns": ..} or {"messages": ..}.'),
    tokens: int | None = option(None, "Stop after this many tokens (at the end)."),
    positions: str = option("auto", f"auto (rolling, full: original), {', '.join(POSITIONS)}."),
    prefill_chunk: int = option(64, "Tokens of text read at once; 1 is the paper's Algorithm 1."),
    max_new_tokens: int = option(128, "Most tokens of an answer."),
    every: int = option(1000, "Tokens between two rows."),
    csv: Path | None = option(None, "Write the rows to this file."),
    plot: Path | None = option(None, "Plot them: .png, .svg or .pdf."),
    checkpoint: Path | None = option(None, "Save the cache and the place here, to be resumed."),
    save_every: int = option(10_000, "Tokens between two checkpoints."),
    resume: bool = option(False, "Continue from --checkpoint; --tokens may be larger.", "--resume"),
    seed: int = option(0, "Random seed, for --policy random."),
    as_json: bool = JSON,
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
    from h2okv.cache.validation import context_window
    from h2okv.evaluation.stream_data import ConversationSource, TextSource
    from h2okv.evaluation.streaming import Stream, StreamSettings

    settings = StreamSettings(prefill_chunk, every, tokens, max_new_tokens)
    check_least(save_every=save_every)
    if (text is None) == (input is None):
        what = "both --text and --input are" if text else "neither --text nor --input is"
        raise ValueError(f"{what} given; give one of them")
    files = _Files(csv, plot, checkpoint, resume)
    described = model.describe()
    wanted = args.parse_positions(positions) or ("original" if cache.is_full else "rolling")
    # A fraction is of the context window, for a stream has no end.
    parts = cache.budget.resolve(described.context or _NO_WINDOW)
    cache = replace(cache, heavy=parts.heavy, recent=parts.recent, positions=wanted).seeded(seed)
    # A bad budget shows before anything is read.
    made = H2OCache.from_config(described.config, cache)
    # Now, not at the block that would reach beyond the window.
    if reason := cache.past_window(parts.total, prefill_chunk, context_window(described.config)):
        raise ValueError(reason)
    vocab_size = described.vocab_size
    source: TextSource | ConversationSource
    if text is not None:
        content = read_text_file(text)
        source = TextSource.of_text(content, described.tokenizer, vocab_size)
        if tokens is not None and source.num_tokens < tokens:
            write_remark(f"note: the text has {source.num_tokens} tokens to read, not {tokens}")
    else:
        assert input is not None
        source = ConversationSource(input, described.tokenizer, vocab_size)
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
    code = _run(running, described, cache, files, save_every, as_json)
    if as_json:
        rows = [row._asdict() for row in running.all_rows()]
        write_json({**identity, "tokens": running.state.position, "rows": rows})
    return code


def _run(
    running: Stream,
    described: Described,
    cache: CacheConfig,
    files: _Files,
    save_every: int,
    as_json: bool,
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
    bar = Progress("streaming", total, "tokens")
    with Interrupt(running.model) as interrupt, bar as progress:

        def on_step(step: Step) -> None:
            if progress.is_drawn:
                last = f" | last row {perplexity(state.rows[-1].nll)}" if state.rows else ""
                progress.update(state.position, note=_summary(running) + last)
            if step.answer is not None and not is_text and not as_json:
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
    drawn = running.all_rows() if ended else state.rows
    if files.plot is not None and drawn:
        plot_stream(files.plot, drawn, described.context, f"{described.name}: {cache.label}")
    write_remark(_summary(running))
    if ended:
        return 0
    write_remark(_how_to_resume(running, files.checkpoint))
    return INTERRUPTED


def _answer(running: Stream, described: Described, answer: tuple[int, ...]) -> str:
    state = running.state
    heading = f"--- sample {state.sample + 1}, answer {state.segment + 1} ---\n"
    return heading + str(described.tokenizer.decode(list(answer), skip_special_tokens=True)) + "\n"


def perplexity(nll: float) -> str:
    """Writes a perplexity for people."""
    return f"{math.exp(nll):.4g}" if nll < 600 else "beyond 1e260"


def _summary(running: Stream) -> str:
    """Speed, perplexity and memory so far."""
    from h2okv.engine.memory import resident_bytes

    state, resident = running.state, resident_bytes()
    parts = [f"{state.position} tokens"]
    if state.position:
        parts.append(f"perplexity {perplexity(state.total_nll / state.position)}")
    if state.seconds:
        parts.append(f"{state.position / state.seconds:,.0f} tokens/s")
    parts.append(f"cache {format_bytes(running.cache.nbytes)}")
    if resident is not None:
        parts.append(f"process {format_bytes(resident)}")
    return " | ".join(parts)


def _how_to_resume(running: Stream, checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "stopped; with --checkpoint FILE a stream can be resumed"
    if not checkpoint.exists():
        return "stopped before the first checkpoint, so that there is nothing to resume"
    return (
        f"stopped at token {running.state.position}; continue with the same command and --resume"
        f" (the checkpoint is '{checkpoint}')"
    )
