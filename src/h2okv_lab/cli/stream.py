"""`h2okv stream`: endless text on one cache, scored token by token."""

from __future__ import annotations

import math
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    from h2okv_lab.evaluation.streaming import ConversationSource, Stream, StreamFile, TextSource

_ROW = 1000  # tokens of a text between two rows
_BLOCK = 64  # tokens of input in one forward
_NO_WINDOW = 8192  # replaces the context window of a model without one


def stream(
    choice: args.Choice = args.cache_options("25%", "h2o", min_tokens=0),
    model: ModelOptions = args.model_options(),
    text: Path | None = option(None, "Text to read and score.", read=readers.readable),
    input: Path | None = option(
        None, 'JSONL of {"turns": ..} or {"messages": ..}.', read=readers.readable
    ),
    tokens: int | None = option(None, "Stop after this many.", read=readers.count),
    max_new_tokens: int = option(128, "Maximum number of new tokens.", read=readers.count),
    every: int | None = option(
        None, "Tokens between rows (1000; with --input a turn).", read=readers.count
    ),
    csv: Path | None = option(None, "Write the rows to this file.", read=readers.writable),
    plot: Path | None = option(None, "Plot them: .png, .svg or .pdf.", read=options.picture),
    as_json: bool = JSON,
) -> int:
    if (text is None) == (input is None):
        problem = "both --text and --input are" if text else "neither --text nor --input is"
        raise ValueError(f"{problem} given; give one of them")
    wording = None if text is None else read_text_file(text)
    from h2okv.cache.support import context_window
    from h2okv.calibration.layer_budgets import with_measured_budgets
    from h2okv_lab.evaluation.plots import plot_stream
    from h2okv_lab.evaluation.streaming import (
        ConversationSource,
        Stream,
        StreamFile,
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
    h2o_cache = h2okv.H2OCache.from_config(loaded, cache)
    running = Stream(loaded, h2o_cache, source, settings)
    rows = None if csv is None else StreamFile(csv)
    try:
        ended = _run(running, described, rows, shows_answers=not as_json)
    finally:
        if rows is not None:
            rows.close()
    drawn = running.all_rows() if ended else running.rows
    if plot is not None and drawn:
        plot_stream(plot, drawn, described.context, f"{described.name}: {cache.label}")
    write_remark(_summary(running))
    if not ended:
        write_remark("stopped before the end; the same command begins again at the start")
    if as_json:
        scoring = None if cache.scoring == "sum" else cache.scoring
        fields = {**cache.to_record(), "scoring": scoring, "tokens": running.position}
        write_json({**fields, "rows": [row._asdict() for row in running.all_rows()]})
    return 0 if ended else INTERRUPTED


def _run(
    running: Stream, described: Described, rows: StreamFile | None, shows_answers: bool
) -> bool:
    """Read the stream, write its rows and show its answers; return whether it came to its end."""
    from h2okv_lab.evaluation.streaming import TextSource

    source, total = running.source, running.settings.tokens
    if isinstance(source, TextSource):
        total = source.num_tokens if total is None else min(total, source.num_tokens)
    with (
        Interrupt() as interrupt,
        Progress("streaming", total, "tokens") as progress,
        suppress(KeyboardInterrupt),  # the second Ctrl-C, which does not wait for the block
        closing(running.blocks()) as blocks,  # closing restores the model's attention
    ):
        for step in blocks:
            if rows is not None:
                rows.extend(step.rows)
            if progress.is_drawn:
                last = f" | last row {perplexity(running.rows[-1].nll)}" if running.rows else ""
                progress.update(running.position, note=_summary(running) + last)
            if step.answer is not None and shows_answers:
                answer = described.tokenizer.decode(list(step.answer), skip_special_tokens=True)
                location = f"sample {running.sample + 1}, answer {running.segment + 1}"
                write_text(f"--- {location} ---\n{answer}\n")
            if interrupt.requested:
                return False
        if rows is not None:
            rows.extend(running.all_rows()[len(running.rows) :])
        return True
    return False


def perplexity(nll: float) -> str:
    return f"{math.exp(nll):.4g}" if nll < 600 else "beyond 1e260"


def _summary(running: Stream) -> str:
    """Return tokens, perplexity, speed and memory so far."""
    from h2okv.engine.memory import resident_bytes

    resident = resident_bytes()
    figures = [f"{running.position} tokens"]
    if running.position:
        figures.append(f"perplexity {perplexity(running.total_nll / running.position)}")
    if running.seconds:
        figures.append(f"{running.position / running.seconds:,.0f} tokens/s")
    figures.append(f"cache {format_bytes(running.cache.nbytes)}")
    if resident is not None:
        figures.append(f"process {format_bytes(resident)}")
    return " | ".join(figures)
