"""`h2okv chat`: a conversation on one cache that never grows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import h2okv
from h2okv.cli.cache_choice import CacheChoice
from h2okv.cli.chat_answer import Answer
from h2okv.cli.chat_cache import parse_tokens, plan_cache, probe_positions
from h2okv.cli.chat_commands import Commands, QuitChat, load_and_tell
from h2okv.cli.chat_input import EntryReader, entries_of_stdin
from h2okv.cli.chat_session import Chat, Partner
from h2okv.cli.exit_codes import INTERRUPTED
from h2okv.cli.options import (
    COMPILE_HELP,
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
    POLICY_HELP,
    SCORING_HELP,
    Sampling,
    parse_device,
    parse_dtype,
)
from h2okv.cli.output import OutputClosedError, write_remark, write_text
from h2okv.cli.report import format_bytes
from h2okv.integration.loading import BUNDLED, describe, load_weights

HELP = """Chat with a model on one H2O cache.

Only what is new is read in each turn, and the cache never holds more than
its budget, so that a chat can go on for ever.

Answers stream to stdout, all else goes to stderr. /help lists what can be
typed beside a turn; from a pipe, each line or block is a turn.

Examples:

    h2okv chat

    h2okv chat --model ./my-model --heavy 512 --recent 512 --sink 4 --system "Answer briefly."

    h2okv chat --load evening.chat
"""


def chat(
    model: Annotated[str, typer.Option(help="A folder, a Hub id, or the bundled model.")] = BUNDLED,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "h2o",
    heavy: Annotated[str, typer.Option(help="Heavy hitters to keep, in tokens.")] = "256",
    recent: Annotated[str, typer.Option(help="Newest tokens to keep, in tokens.")] = "256",
    sink: Annotated[int, typer.Option(help="First tokens to keep whatever their score.")] = 0,
    scoring: Annotated[str, typer.Option(help=SCORING_HELP)] = "sum",
    decay: Annotated[float | None, typer.Option(help=DECAY_HELP, show_default=False)] = None,
    kv_bits: Annotated[int | None, typer.Option(help=KV_BITS_HELP, show_default=False)] = None,
    positions: Annotated[
        str,
        typer.Option(help="auto (rolling where the model can), original, rolling or clamped."),
    ] = "auto",
    prefill_chunk: Annotated[
        int | None,
        typer.Option(help="The most tokens of a turn that are read at once.", show_default="512"),
    ] = None,
    system: Annotated[str, typer.Option(help="What stands before the first turn.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest with this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Where the random numbers start.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help=COMPILE_HELP)] = False,
    load: Annotated[Path | None, typer.Option(help="Go on with a saved chat.")] = None,
) -> int:
    """Chats on one cache, as `HELP` tells the user."""
    if load is not None and system:
        raise ValueError("--system has no effect with --load, for the saved chat has its own")
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    amounts = parse_tokens("heavy", heavy), parse_tokens("recent", recent)
    choice = CacheChoice(policy, *amounts, sink, scoring=scoring, decay=decay, kv_bits=kv_bits)
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    described = describe(model)
    choice, remark = plan_cache(described.config, choice, positions, prefill_chunk)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    with h2okv.enable(loaded, compile=compile):
        choice, doubt = probe_positions(loaded, choice, positions)
        cache = choice.make(loaded.config, seed)
        session = Chat(Partner(loaded, described, sampling), cache, system)
        if load is not None:
            load_and_tell(session, load)
        elif remark or doubt:
            write_remark(remark or doubt or "")
        if sys.stdin.isatty():
            write_remark(greeting(session))
        return converse(session, entries_of_stdin())


def greeting(session: Chat) -> str:
    """Says who is there, before the first turn.

    Args:
        session: The chat.

    Returns:
        A few lines.
    """
    partner, cache = session.partner, session.cache
    name, dtype = partner.described.name, str(partner.model.dtype).removeprefix("torch.")
    if partner.described.tokenizer.chat_template is not None:
        manner = "its own chat template"
    elif name == BUNDLED:
        manner = "a plain dialogue; it writes book-like English and is no assistant"
    else:
        manner = "a plain dialogue, for it has no chat template"
    budget = cache.budget
    return (
        f"{name}, {dtype} on {partner.model.device}: {manner}\n"
        f"cache: {cache.policy.name}, sink {budget.sink} + heavy {budget.heavy} + recent"
        f" {budget.recent} tokens, positions {cache.rule.positions}\n"
        "/help lists what can be typed beside a turn"
    )


def converse(session: Chat, entries: EntryReader) -> int:
    """Takes one entry after the other, until there is none or the user leaves.

    Whatever is wrong with an entry is said in one sentence, and the chat goes on.

    Args:
        session: The chat; mutated.
        entries: Where the entries come from.

    Returns:
        The exit code: 0, or 130 if the user left by Ctrl-C.
    """
    commands = Commands(session)
    leaving = False
    while True:
        try:
            entry = entries.read()
            leaving = False
            if entry is None:
                return 0
            if entry.is_command:
                commands.run(entry.text)
            elif entry.text.strip():
                _answer(session, entry.text)
        except KeyboardInterrupt:
            if leaving:
                return INTERRUPTED
            leaving = True
            write_remark("\n(Ctrl-C again leaves)")
        except QuitChat:
            return 0
        except OutputClosedError:
            raise
        except torch.OutOfMemoryError:
            write_remark("the device is out of memory; say less, or start with a smaller budget.")
        except (ValueError, OSError) as error:
            write_remark(f"{' '.join(str(error).split()).rstrip('.')}.")


def _answer(session: Chat, message: str) -> None:
    """Shows an answer as it comes, and then what it took."""
    shown = False

    def write(piece: str) -> None:
        nonlocal shown
        shown = True
        write_text(piece)

    try:
        answer = session.say(message, write, show_progress=True)
    finally:
        if shown:
            write_text("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(status_line(session, answer), style="dim", markup=False)
    if session.is_broken:
        write_remark(
            "the second Ctrl-C cut the model in the middle of a token, and the cache is of no use"
            " any more: /reset begins a new chat, /load FILE goes back to a saved one."
        )


def status_line(session: Chat, answer: Answer) -> str:
    """Puts what an answer took in one line.

    Args:
        session: The chat, after the answer.
        answer: The answer.

    Returns:
        The line, without a line end.
    """
    cache = session.cache
    held, full = format_bytes(cache.nbytes), format_bytes(cache.full_nbytes)
    first, speed = answer.time_to_first_token, answer.tokens_per_second
    waiting = len(session.transcript.token_ids) - cache.num_seen_tokens - len(answer.token_ids)
    rest = f", {waiting:,} tokens of the turn are read with the next one" if waiting > 0 else ""
    endings = {
        "length": f"cut at --max-new-tokens {session.partner.sampling.max_new_tokens}",
        "context": "cut, the context is full",
        "interrupted": f"stopped{rest}",
    }
    parts = [
        f"{cache.num_seen_tokens:,} tokens seen",
        f"{cache.num_cached_tokens:,} held",
        f"cache {held} of a full one's {full}",
        "- tokens/s" if speed is None else f"{speed:.1f} tokens/s",
        "no token" if first is None else f"first after {first:.2f} s",
    ]
    if answer.finish_reason in endings:
        parts.append(endings[answer.finish_reason])
    return " | ".join(parts)
