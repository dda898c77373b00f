"""`h2okv stream`: text without end on one cache, scored as it goes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from h2okv.cache.validation import context_window
from h2okv.cli.args import (
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
    POLICY_HELP,
    SCORING_HELP,
    CacheChoice,
    Model,
    parse_device,
    parse_dtype,
)
from h2okv.config import POSITIONS
from h2okv.console import (
    INTERRUPTED,
    Interrupt,
    Progress,
    format_bytes,
    write_remark,
    write_text,
)
from h2okv.engine.memory import resident_bytes
from h2okv.evaluation.plots import check_plot, plot_stream
from h2okv.evaluation.stream_data import ConversationSource, TextSource
from h2okv.evaluation.streaming import Setting, Step, Stream, StreamFile, StreamSettings, run_stream
from h2okv.integration.loading import Described, describe, load_weights
from h2okv.integration.models import BUNDLED

# What each part of the budget gets if nothing else is said: a share of the context window, but no
# more than a window of 8,192 tokens would give.
_DEFAULT_SHARE = 8
_MOST_BY_DEFAULT = 1024

HELP = """Run a text or conversations through one cache, far past the context window.

A text is scored token by token. Of conversations each question is answered, and answers that the
file gives are read. Everything goes sample after sample on one cache that is never emptied.

Examples:

    h2okv stream --text book.txt --tokens 100000 --csv h2o.csv --plot h2o.png

    h2okv stream --text book.txt --tokens 8000 --policy full --csv full.csv

    h2okv stream --input mt_bench.jsonl --checkpoint chats.safetensors

    h2okv stream --input mt_bench.jsonl --checkpoint chats.safetensors --resume
"""


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
            if path is None:
                continue
            if path.is_dir():
                raise ValueError(f"--{name} '{path}' is a folder; give a file")
            if not path.parent.is_dir():
                raise ValueError(f"--{name} '{path}' is in no folder that exists; make it first")
        if self.plot is not None:
            check_plot(self.plot)
        if self.resume and self.checkpoint is None:
            raise ValueError("--resume needs --checkpoint FILE, the file to go on from")
        if not self.resume and self.checkpoint is not None and self.checkpoint.exists():
            raise ValueError(
                f"--checkpoint '{self.checkpoint}' exists already; add --resume to go on from it,"
                " or move it away to begin again"
            )


def stream(
    text: Annotated[Path | None, typer.Option(help="A text to read and score.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(help='JSONL of conversations: {"turns": [..]} or {"messages": [..]}.'),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Stop here; else at the end.")] = None,
    model: Model = BUNDLED,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "h2o",
    heavy: Annotated[
        int | None,
        typer.Option(help="Heavy hitters to keep, in tokens; else window / 8, 1024 at most."),
    ] = None,
    recent: Annotated[
        int | None,
        typer.Option(help="Newest tokens to keep, in tokens; else window / 8, 1024 at most."),
    ] = None,
    sink: Annotated[int, typer.Option(help="First tokens to keep whatever their score.")] = 0,
    scoring: Annotated[str, typer.Option(help=SCORING_HELP)] = "sum",
    decay: Annotated[float | None, typer.Option(help=DECAY_HELP, show_default=False)] = None,
    kv_bits: Annotated[int | None, typer.Option(help=KV_BITS_HELP, show_default=False)] = None,
    positions: Annotated[
        str,
        typer.Option(help=f"auto (rolling, but original for full), {', '.join(POSITIONS)}."),
    ] = "auto",
    prefill_chunk: Annotated[
        int, typer.Option(help="Tokens of text read at once; 1 is the paper's Algorithm 1.")
    ] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 128,
    every: Annotated[int, typer.Option(help="Tokens between two rows.")] = 1000,
    csv: Annotated[Path | None, typer.Option(help="Where the rows go.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of them: .png, .svg, .pdf.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Save cache and place here, to be resumed.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Tokens between two checkpoints.")] = 10_000,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint; --tokens may be larger.")
    ] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    seed: Annotated[int, typer.Option(help="For the policy random.")] = 0,
) -> int:
    """Streams a source through one cache, as `HELP` tells the user."""
    settings = StreamSettings(prefill_chunk, every, tokens, max_new_tokens)
    if save_every < 1:
        raise ValueError(f"--save-every {save_every} is too few; give 1 or more")
    if (text is None) == (input is None):
        what = "both --text and --input are" if text else "neither --text nor --input is"
        raise ValueError(f"{what} given; give one of them")
    files = _Files(csv, plot, checkpoint, resume)
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    described = describe(model)
    choice = _choice(described, policy, heavy, recent, sink, positions)
    choice = replace(choice, scoring=scoring, decay=decay, kv_bits=kv_bits)
    choice.make(described.config, seed)  # a bad budget is heard about before anything is read
    _check_room(described, choice, settings)
    source = _source(described, text, input)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    identity: dict[str, Setting] = {
        "policy": policy, "heavy": choice.heavy, "recent": choice.recent, "sink": sink,
        "positions": choice.positions, "seed": seed,
        "scoring": None if scoring == "sum" else scoring, "decay": decay,
        "kv_bits": kv_bits,
    }  # fmt: skip
    if files.resume and files.checkpoint is not None:
        running = Stream.resume(loaded, files.checkpoint, source, settings, identity)
    else:
        cache = choice.make(described.config, seed)
        running = Stream(loaded, cache, source, settings, identity)
    _note_short_text(source, settings)
    return _run(running, described, choice, files, save_every)


def _choice(
    described: Described, policy: str, heavy: int | None, recent: int | None, sink: int, wanted: str
) -> CacheChoice:
    window = described.context or _MOST_BY_DEFAULT
    part = max(1, min(window // _DEFAULT_SHARE, _MOST_BY_DEFAULT))
    positions = wanted
    if wanted == "auto":
        positions = "original" if policy == "full" else "rolling"
    for name in POSITIONS:
        if name == positions:
            heavy, recent = (part if amount is None else amount for amount in (heavy, recent))
            return CacheChoice(policy, heavy, recent, sink, name)
    raise ValueError(f"--positions {wanted!r} is not known; choose auto, {', '.join(POSITIONS)}")


def _source(
    described: Described, text: Path | None, conversations: Path | None
) -> TextSource | ConversationSource:
    vocab_size = described.config.get_text_config().vocab_size
    if text is not None:
        return TextSource.of_file(text, described.tokenizer, vocab_size)
    assert conversations is not None
    return ConversationSource(conversations, described.tokenizer, vocab_size)


def _check_room(described: Described, choice: CacheChoice, settings: StreamSettings) -> None:
    """Refuses ranks past the context window now, not at the block that would reach them."""
    held = int(choice.heavy) + int(choice.recent) + choice.sink
    window = context_window(described.config)
    if (
        choice.positions == "rolling"
        and window is not None
        and held + settings.prefill_chunk > window
    ):
        raise ValueError(
            f"a budget of {held} tokens and a --prefill-chunk of {settings.prefill_chunk} are more"
            f" than the context window of {window}; make --heavy, --recent or"
            " --prefill-chunk smaller"
        )


def _note_short_text(source: TextSource | ConversationSource, settings: StreamSettings) -> None:
    wanted = settings.tokens
    if wanted is not None and isinstance(source, TextSource) and source.num_tokens < wanted:
        write_remark(f"note: the text has {source.num_tokens} tokens to read, not {wanted}")


def _run(
    running: Stream, described: Described, choice: CacheChoice, files: _Files, save_every: int
) -> int:
    """Runs the stream with everything around it, and tells how it ended."""
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
        title = f"{described.name}: {choice.label}, {choice.positions} positions"
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
        f"stopped at token {running.state.position}; go on with the same command and --resume"
        f" (the checkpoint is '{files.checkpoint}')"
    )
