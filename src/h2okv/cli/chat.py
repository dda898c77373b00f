"""`h2okv chat`."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from h2okv.cli.args import (
    BUNDLED,
    COMPILE_HELP,
    ModelOptions,
    SamplingOptions,
    cache_options,
    model_options,
    own_generation_config,
    sampling_options,
)
from h2okv.config import POSITIONS, CacheConfig, Positions
from h2okv.console import INTERRUPTED, OutputClosedError, format_bytes, write_remark, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from h2okv.chat.generation import Generation
    from h2okv.chat.session import Chat

# Enough to read fast, few enough to hear Ctrl-C soon.
_CHUNK = 512
_AUTO = "auto"


@cache_options(budget="512", without=("positions",))
@model_options()
@sampling_options(max_new_tokens=256)
def chat(
    cache: CacheConfig,
    model: ModelOptions,
    sampling: SamplingOptions,
    positions: Annotated[
        str, typer.Option(help="auto (rolling where the model can), original, rolling or clamped.")
    ] = _AUTO,
    system: Annotated[str, typer.Option(help="System message, before the first turn.")] = "",
    compile: Annotated[bool, typer.Option("--compile", help=COMPILE_HELP)] = False,
    load: Annotated[Path | None, typer.Option(help="Continue a saved chat.")] = None,
) -> int:
    """Chat with a model in constant KV memory.

    Only what is new is read in each turn, and the cache never holds more than its budget, so that
    a chat can go on for ever. Answers stream to stdout, all else goes to stderr. /help lists what
    can be typed beside a turn; from a pipe, each line or block is a turn.

    Examples:

        h2okv chat --model smollm2

        h2okv chat --model ./my-model --budget 1024 --sink 4 --system "Answer briefly."

        h2okv chat --load evening.chat
    """
    from h2okv.cache import H2OCache
    from h2okv.chat.session import Chat, Partner, read_chat
    from h2okv.integration import enable

    if load is not None and system:
        raise ValueError("--system has no effect with --load, for the saved chat has its own")
    check_tokens(cache)
    described = model.describe()
    params = sampling.params(own_generation_config(described))
    cache, remark = plan_cache(described.config, cache, positions)
    if load is not None:
        read_chat(load, described.config)  # mistakes show before the weights load
    loaded = model.load(described)
    with enable(loaded, compile=compile):
        cache, doubt = probe_positions(loaded, cache, positions)
        made = H2OCache.from_config(loaded.config, cache.seeded(int(params.seed or 0)))
        session = Chat(Partner(loaded, described, params), made, system)
        if load is not None:
            load_and_tell(session, load)
        elif remark or doubt:
            write_remark(remark or doubt or "")
        if sys.stdin.isatty():
            write_remark(greeting(session))
        return converse(session, entries_of_stdin())


def check_tokens(cache: CacheConfig) -> None:
    """Refuses a budget that is a fraction of a prompt."""
    for name in ("heavy", "recent"):
        part = getattr(cache, name)
        if isinstance(part, float) and not cache.is_full:
            raise ValueError(
                f"--{name} {part:g} is a fraction of a prompt, but a chat has no end; give tokens,"
                f" such as --budget 512 or --{name} 256"
            )


def plan_cache(
    config: PreTrainedConfig, cache: CacheConfig, positions: str
) -> tuple[CacheConfig, str | None]:
    """Settles what the user left open; mistakes show before the weights load."""
    from h2okv.cache import H2OCache

    if positions not in (_AUTO, *POSITIONS):
        raise ValueError(
            f"--positions {positions!r} is not known; choose from {', '.join((_AUTO, *POSITIONS))}"
        )
    chunk = cache.prefill_chunk
    if chunk is not None and chunk < 1:
        raise ValueError(f"--prefill-chunk {chunk} reads nothing; give 1 or more")
    H2OCache.from_config(config, cache)
    remark = None
    if positions == _AUTO:
        positions = "rolling"
        try:
            H2OCache.from_config(config, replace(cache, positions="rolling"))
        except ValueError as error:
            positions, remark = "original", _remark(error)
    most = _largest_chunk(config, cache) if positions == "rolling" else None
    if chunk is not None and most is not None and chunk > most:
        raise ValueError(
            f"--prefill-chunk {chunk} does not fit behind the cache's entries in the model's"
            f" context window; give {most} or less, or lower --budget or --sink"
        )
    if chunk is None:
        chunk = _CHUNK if most is None else min(_CHUNK, most)
    planned = replace(cache, positions=cast(Positions, positions), prefill_chunk=chunk)
    H2OCache.from_config(config, planned)
    return planned, remark


def probe_positions(
    model: PreTrainedModel, planned: CacheConfig, positions: str
) -> tuple[CacheConfig, str | None]:
    """Asks the loaded model whether its positions roll, for a config does not tell everything."""
    import torch

    from h2okv.cache import H2OCache

    if positions != _AUTO or planned.positions != "rolling":
        return planned, None
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(token, past_key_values=H2OCache.from_config(model.config, planned))
    except ValueError as error:
        if "positions=" not in str(error):
            raise
        return replace(planned, positions="original"), _remark(error)
    return planned, None


def _largest_chunk(config: PreTrainedConfig, cache: CacheConfig) -> int | None:
    """The most tokens that fit behind a full cache; None for any number."""
    from h2okv.cache.validation import context_window

    window = context_window(config)
    if window is None:
        return None
    held = int(cache.sink + cache.heavy + cache.recent)
    if held >= window:
        raise ValueError(
            f"the budget and --sink are {held} tokens, which leaves no room for a new one in the"
            f" model's context window of {window}; lower them"
        )
    return window - held


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
/load FILE             continue a saved chat; the one that is going on is left
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
        from rich.console import Console

        from h2okv.chat.kept_view import coloured, kept_shares, marked, runs_of

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
    from h2okv.chat.session import sampling_fields

    now, then = sampling_fields(chat.partner.params), sampling_fields(saved.params)
    others = [
        f"--{name.replace('_', '-')} {then[name]}" for name in then if now.get(name) != then[name]
    ]
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
    import torch

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
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(status_line(session, answer), style="dim", markup=False)
    if session.is_broken:
        write_remark(
            "the second Ctrl-C cut the model in the middle of a token, and the cache is of no use"
            " any more: /reset begins a new chat, /load FILE goes back to a saved one."
        )


def status_line(session: Chat, answer: Generation) -> str:
    """Puts what an answer took in one line."""
    cache = session.cache
    held, full = format_bytes(cache.nbytes), format_bytes(cache.full_nbytes)
    first, speed = answer.time_to_first_token, answer.tokens_per_second
    waiting = len(session.transcript.token_ids) - cache.num_seen_tokens - len(answer.token_ids)
    rest = f", {waiting:,} tokens of the turn are read with the next one" if waiting > 0 else ""
    endings = {
        "length": f"cut at --max-new-tokens {session.partner.params.max_tokens}",
        "context": "cut, the context is full",
        "interrupted": f"stopped{rest}",
    }
    parts = [
        f"{cache.num_seen_tokens:,} tokens seen",
        f"{cache.num_cached_tokens:,} held",
        f"cache {held} reserved, full cache {full}",
        "- tokens/s" if speed is None else f"{speed:.1f} tokens/s",
        "no token" if first is None else f"first after {first:.2f} s",
    ]
    if answer.finish_reason in endings:
        parts.append(endings[answer.finish_reason])
    return " | ".join(parts)
