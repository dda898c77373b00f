"""`h2okv stream`: endless text on one cache, scored token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h2okv
from h2okv.cli import args, readers
from h2okv.cli.args import JSON, ModelOptions, option
from h2okv.console import (
    INTERRUPTED,
    Interrupt,
    Progress,
    format_bytes,
    write_json,
    write_remark,
    write_text,
)
from h2okv.records import read_text_file
from h2okv_lab.cli import options

if TYPE_CHECKING:
    from h2okv.models.loading import Described
    from h2okv_lab.evaluation.streaming import ConversationSource, Step, Stream, TextSource

_ROWS_A_CHECKPOINT = 10
_ROW = 1000  # tokens of a text between two rows
_BLOCK = 64  # tokens of input in one forward
_NO_WINDOW = 8192  # replaces the context window of a model without one


@dataclass(frozen=True)
class Files:
    """Output files of a stream; the fields are the command's options."""

    csv: Path | None = option(None, "Write the rows to this file.", read=readers.writable)
    plot: Path | None = option(None, "Plot them: .png, .svg or .pdf.", read=options.picture)
    checkpoint: Path | None = option(None, "Save the state, each 10 rows.", read=readers.writable)
    resume: bool = option(False, "Continue from --checkpoint.", "--resume")

    def __post_init__(self) -> None:
        if self.resume and self.checkpoint is None:
            raise ValueError("--resume needs --checkpoint FILE, the file to continue from")
        if not self.resume and self.checkpoint is not None and self.checkpoint.exists():
            raise ValueError(f"'{self.checkpoint}' exists already; add --resume, or move it away")
        if self.resume and self.checkpoint is not None and not self.checkpoint.is_file():
            raise ValueError(
                f"--checkpoint '{self.checkpoint}' does not exist, so there is nothing to resume;"
                " omit --resume"
            )


_FILES: Any = args.Bundle(Files)


def stream(
    choice: args.Choice = args.cache_options("25%", "h2o", min_tokens=0),
    model: ModelOptions = args.model_options(),
    files: Files = _FILES,
    text: Path | None = option(None, "Text to read and score.", read=readers.readable),
    input: Path | None = option(
        None, 'JSONL of {"turns": ..} or {"messages": ..}.', read=readers.readable
    ),
    tokens: int | None = option(None, "Stop after this many.", read=readers.count),
    max_new_tokens: int = option(128, "Maximum number of new tokens.", read=readers.count),
    every: int | None = option(
        None, "Tokens between rows (1000; with --input a turn).", read=readers.count
    ),
    as_json: bool = JSON,
) -> int:
    if (text is None) == (input is None):
        problem = "both --text and --input are" if text else "neither --text nor --input is"
        raise ValueError(f"{problem} given; give one of them")
    wording = None if text is None else read_text_file(text)
    from h2okv.cache.support import context_window
    from h2okv.calibration.layer_budgets import with_measured_budgets
    from h2okv_lab.evaluation.streaming import (
        ConversationSource,
        Stream,
        StreamSettings,
        TextSource,
    )

    cache = choice.cache if "evict_every" in choice.named else choice.cache.with_cuts(_BLOCK)
    every = every or (None if text is None else _ROW)
    settings = args.build(StreamSettings, locals() | {"block": cache.chunk or _BLOCK})
    described = model.describe()
    positions = cache.positions
    if "positions" not in choice.named:
        positions = "original" if cache.is_full else "rolling"
    # A stream has no end, so fractions are of the context window.
    budget = cache.budget.resolve(described.context or _NO_WINDOW)
    cache = replace(cache, heavy=budget.heavy, recent=budget.recent, positions=positions)
    # A bad budget shows before anything is read, not at the block that exceeds the window.
    args.check_cache(described.config, cache)
    block, window = settings.block, context_window(described.config)
    if reason := cache.past_window(budget.total, block, window):
        raise ValueError(reason)
    tokenizer, vocab_size = described.tokenizer, described.vocab_size
    source: TextSource | ConversationSource
    if wording is not None:
        source = TextSource.of_text(wording, tokenizer, vocab_size)
        if tokens is not None and source.num_tokens < tokens:
            write_remark(f"note: the text has {source.num_tokens} tokens to read, not {tokens}")
    else:
        assert input is not None
        source = ConversationSource(input, tokenizer, vocab_size)
    loaded = model.load(described)
    cache = with_measured_budgets(cache, loaded, described)
    scoring = None if cache.scoring == "sum" else cache.scoring
    identity = {**cache.to_record(), "scoring": scoring}
    if files.resume and files.checkpoint is not None:
        running = Stream.resume(loaded, files.checkpoint, source, settings, identity)
    else:
        h2o_cache = h2okv.H2OCache.from_config(loaded, cache)
        running = Stream(loaded, h2o_cache, source, settings, identity)
    code = _run(running, described, cache.label, files, as_json)
    if as_json:
        rows = [row._asdict() for row in running.all_rows()]
        write_json({**identity, "tokens": running.state.position, "rows": rows})
    return code


def _run(running: Stream, described: Described, label: str, files: Files, as_json: bool) -> int:
    """Run the stream, write its files and its summary; return the exit code."""
    from h2okv_lab.evaluation.plots import plot_stream
    from h2okv_lab.evaluation.streaming import StreamFile, TextSource, run_stream

    source, state, total = running.source, running.state, running.settings.tokens
    if isinstance(source, TextSource):
        total = source.num_tokens if total is None else min(total, source.num_tokens)
    rows = None
    if files.csv is not None:
        rows = StreamFile(files.csv, state.rows if files.resume else None)
    with Interrupt() as interrupt, Progress("streaming", total, "tokens") as progress:

        def on_step(step: Step) -> None:
            if progress.is_drawn:
                last = f" | last row {perplexity(state.rows[-1].nll)}" if state.rows else ""
                progress.update(state.position, note=_summary(running) + last)
            if step.answer is not None and not as_json:
                answer = described.tokenizer.decode(list(step.answer), skip_special_tokens=True)
                location = f"sample {state.sample + 1}, answer {state.segment + 1}"
                write_text(f"--- {location} ---\n{answer}\n")

        try:
            ended = run_stream(
                running,
                rows=rows,
                checkpoint=files.checkpoint,
                save_every=_ROWS_A_CHECKPOINT * (running.settings.every or _ROW),
                should_stop=lambda: interrupt.requested,
                on_step=on_step,
            )
        except KeyboardInterrupt:  # the second Ctrl-C, which does not wait for the block
            ended = False
        finally:
            if rows is not None:
                rows.close()
    drawn = running.all_rows() if ended else state.rows
    if files.plot is not None and drawn:
        plot_stream(files.plot, drawn, described.context, f"{described.name}: {label}")
    write_remark(_summary(running))
    if ended:
        return 0
    message = "stopped; with --checkpoint FILE a stream can be resumed"
    if files.checkpoint is not None:
        message = "stopped before the first checkpoint, so there is nothing to resume"
        if files.checkpoint.exists():
            message = (
                f"stopped at token {state.position}; continue with the same command and --resume"
                f" (the checkpoint is '{files.checkpoint}')"
            )
    write_remark(message)
    return INTERRUPTED


def perplexity(nll: float) -> str:
    return f"{math.exp(nll):.4g}" if nll < 600 else "beyond 1e260"


def _summary(running: Stream) -> str:
    """Return tokens, perplexity, speed and memory so far."""
    from h2okv.engine.memory import resident_bytes

    state, resident = running.state, resident_bytes()
    figures = [f"{state.position} tokens"]
    if state.position:
        figures.append(f"perplexity {perplexity(state.total_nll / state.position)}")
    if state.seconds:
        figures.append(f"{state.position / state.seconds:,.0f} tokens/s")
    figures.append(f"cache {format_bytes(running.cache.nbytes)}")
    if resident is not None:
        figures.append(f"process {format_bytes(resident)}")
    return " | ".join(figures)
