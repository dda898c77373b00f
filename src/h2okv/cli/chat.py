"""`h2okv chat`."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel

import h2okv
from h2okv.cache.validation import context_window
from h2okv.chat.kept_view import coloured, kept_shares, marked, runs_of
from h2okv.chat.session import Answer, Chat, Partner
from h2okv.cli.args import (
    COMPILE_HELP,
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
    POLICY_HELP,
    SCORING_HELP,
    CacheChoice,
    Model,
    Sampling,
    parse_amount,
    parse_device,
    parse_dtype,
)
from h2okv.config import POSITIONS, Positions
from h2okv.console import INTERRUPTED, OutputClosedError, format_bytes, write_remark, write_text
from h2okv.integration.loading import describe, load_weights
from h2okv.integration.models import BUNDLED

# Enough to read fast, few enough to hear Ctrl-C soon.
_CHUNK = 512
_AUTO = "auto"


def parse_tokens(name: str, text: str) -> int:
    """Reads a part of the budget in tokens."""
    amount = parse_amount(name, text)
    if isinstance(amount, float):
        raise ValueError(
            f"--{name} {text} is a share of a prompt, but a chat has no end; give tokens, such as"
            f" --{name} 256"
        )
    return amount


def plan_cache(
    config: PreTrainedConfig, choice: CacheChoice, positions: str, chunk: int | None
) -> tuple[CacheChoice, str | None]:
    """Settles what the user left open, and hears about mistakes before the weights load."""
    if positions not in (_AUTO, *POSITIONS):
        raise ValueError(
            f"--positions {positions!r} is not known; choose from {', '.join((_AUTO, *POSITIONS))}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"--prefill-chunk {chunk} reads nothing; give 1 or more")
    choice.make(config, seed=0)
    remark = None
    if positions == _AUTO:
        positions = "rolling"
        try:
            replace(choice, positions="rolling").make(config, seed=0)
        except ValueError as error:
            positions, remark = "original", _remark(error)
    most = _largest_chunk(config, choice) if positions == "rolling" else None
    if chunk is not None and most is not None and chunk > most:
        raise ValueError(
            f"--prefill-chunk {chunk} does not fit behind the cache's entries in the window that"
            f" --model was trained on; give {most} or less, or lower --heavy, --recent or --sink"
        )
    if chunk is None:
        chunk = _CHUNK if most is None else min(_CHUNK, most)
    planned = replace(choice, positions=cast(Positions, positions), prefill_chunk=chunk)
    planned.make(config, seed=0)
    return planned, remark


def probe_positions(
    model: PreTrainedModel, planned: CacheChoice, positions: str
) -> tuple[CacheChoice, str | None]:
    """Asks the loaded model whether its positions roll, for a config does not tell everything."""
    if positions != _AUTO or planned.positions != "rolling":
        return planned, None
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(token, past_key_values=planned.make(model.config, seed=0))
    except ValueError as error:
        if "positions=" not in str(error):
            raise
        return replace(planned, positions="original"), _remark(error)
    return planned, None


def _largest_chunk(config: PreTrainedConfig, choice: CacheChoice) -> int | None:
    """The most tokens that fit behind a full cache; None for any number."""
    window = context_window(config)
    if window is None:
        return None
    budget = int(choice.sink + choice.heavy + choice.recent)
    if budget >= window:
        raise ValueError(
            f"--sink, --heavy and --recent add up to {budget} tokens, which leaves no room for a"
            f" new one in the window of {window} that --model was trained on; lower them"
        )
    return window - budget


def _remark(error: ValueError) -> str:
    reason = str(error).rstrip(".")
    return f"note: positions stay original, so the chat ends with the model's context ({reason})"


_LONG_CHAT = 2000
_SHORTEN_ABOVE = 30

_HELP = '''Type a turn and press Enter. A line that ends in a backslash goes on in the next one, and
whatever stands between two lines of """ is one turn as it is.

/cache [LAYER [HEAD]]  the chat so far: which tokens the cache still holds, by all layers and heads
                       or by the one named
/save FILE             write the chat and its cache to a file
/load FILE             go on with a saved chat; the one that is going on is left
/reset                 forget everything but the system text
/help                  this text
/quit                  leave; Ctrl-D does it too

Ctrl-C ends an answer and keeps the chat; at the prompt it clears the line, twice it leaves.
'''


class QuitChat(Exception):  # noqa: N818  nothing went wrong
    """The user wants to leave."""


@dataclass(frozen=True)
class Commands:
    """The commands of a chat.

    Attributes:
        chat: The chat that they act on.
    """

    chat: Chat

    def run(self, line: str) -> None:
        """Runs one command."""
        known: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/cache": self._cache,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/quit": self._quit,
        }
        name, _, rest = line.strip().partition(" ")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}" if close else "/help lists what there is"
            raise ValueError(
                f"{name!r} is not a command; {hint} (a turn that begins with / goes between two"
                ' lines of """)'
            )
        known[name](rest.strip())

    def _help(self, rest: str) -> None:
        write_text(_HELP)

    def _quit(self, rest: str) -> None:
        raise QuitChat

    def _reset(self, rest: str) -> None:
        self.chat.reset()
        write_remark("a new chat")

    def _save(self, rest: str) -> None:
        path = _file("/save", rest)
        self.chat.save(path)
        write_remark(f"saved to '{path}'")

    def _load(self, rest: str) -> None:
        load_and_tell(self.chat, _file("/load", rest))

    def _cache(self, rest: str) -> None:
        words = rest.split()
        if len(words) > 2:
            raise ValueError(f"/cache {rest} names too much; give /cache [LAYER [HEAD]]")
        layer, head = ([_number(word) for word in words] + [None, None])[:2]
        transcript, cache = self.chat.transcript, self.chat.cache
        if not transcript.token_ids:
            raise ValueError("there is nothing in the cache yet; say something first")
        if self.chat.is_broken:
            raise ValueError("the cache is broken since the last answer was cut; use /reset")
        shares = kept_shares(cache, layer, head)
        shorten = _SHORTEN_ABOVE if len(transcript.token_ids) > _LONG_CHAT else None
        tokenizer = self.chat.partner.described.tokenizer
        runs = list(runs_of(tokenizer, transcript.token_ids, shares, shorten))
        console = Console(file=sys.stdout, highlight=False)
        if console.color_system is None or console.no_color:
            write_text(marked(runs) + "\n")
            return
        with console.capture() as captured:
            console.print(coloured(runs))
        _show(captured.get())


def load_and_tell(chat: Chat, path: Path) -> None:
    """Takes up a saved chat and says so on stderr."""
    saved = chat.load(path)
    turns = sum(message["role"] == "user" for message in saved.transcript.messages)
    cache = chat.cache
    write_remark(
        f"'{path}': {turns} {'turn' if turns == 1 else 'turns'}, {cache.num_seen_tokens:,} tokens"
        f" read, {cache.num_cached_tokens:,} held; {cache!r}"
    )
    now, then = asdict(chat.partner.sampling), asdict(saved.sampling)
    others = [f"--{name.replace('_', '-')} {then[name]}" for name in now if now[name] != then[name]]
    if others:
        write_remark(f"note: it was saved with {' '.join(others)}; this chat goes on with its own")


def _show(text: str) -> None:
    """Shows a coloured text, one that is longer than the terminal through a pager."""
    if not sys.stdin.isatty() or text.count("\n") < shutil.get_terminal_size().lines:
        write_text(text)
        return
    import pydoc

    # less shows colours only if it is told to.
    options = os.environ.get("LESS", "")
    if "R" not in options:
        os.environ["LESS"] = f"{options} -R".strip()
    pydoc.pager(text)


def _file(command: str, rest: str) -> Path:
    if not rest:
        raise ValueError(f"{command} needs a file, such as {command} evening.chat")
    return Path(rest)


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number; give /cache [LAYER [HEAD]]") from None


BLOCK_MARK = '"""'
_PROMPT = "> "
_MORE = "... "


@dataclass(frozen=True)
class Entry:
    """One turn or one command.

    Attributes:
        text: Without the last line's end.
        is_command: Whether it is a line that begins with a slash; a block never is.
    """

    text: str
    is_command: bool


class EntryReader:
    """Puts lines together: a line that ends in a backslash goes on, and so does a block."""

    def __init__(self, read_line: Callable[[str], str | None]) -> None:
        self._read_line = read_line

    def read(self) -> Entry | None:
        """Reads the next entry."""
        line = self._read_line(_PROMPT)
        if line is None:
            return None
        if line.strip() == BLOCK_MARK:
            return Entry(_checked("\n".join(self._block())), is_command=False)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._read_line(_MORE)
            if more is None:
                break
            lines.append(more)
        is_command = len(lines) == 1 and line.startswith("/") and "\n" not in line
        return Entry(_checked("\n".join(lines)), is_command)

    def _block(self) -> list[str]:
        """Lines up to the mark; the end of the input ends a block too, so that nothing is lost."""
        lines: list[str] = []
        while (line := self._read_line(_MORE)) is not None and line.strip() != BLOCK_MARK:
            lines.append(line)
        return lines


def entries_of_stdin() -> EntryReader:
    """Reads stdin: a terminal with line editing and history, anything else without a word."""
    if hasattr(sys.stdin, "reconfigure"):
        # Bytes that are no text are found out about in the entry that holds them.
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        return EntryReader(_read_pipe)
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  importing it gives input() editing and history
    return EntryReader(_read_terminal)


def _read_terminal(prompt: str) -> str | None:
    try:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()
    except EOFError:
        print(file=sys.stderr)  # what comes next shall not stand behind the prompt
        return None


def _read_pipe(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        where = f"line {line} of the input" if "\n" in text else "the line"
        raise ValueError(f"{where} is not UTF-8 text; convert it to UTF-8") from error
    return text


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
    model: Model = BUNDLED,
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
    """Says who is there, before the first turn."""
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
    """Puts what an answer took in one line."""
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
