"""What can be asked of a chat beside a turn: lines that begin with a slash."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from h2okv.cli.chat_session import Chat
from h2okv.cli.kept_text import coloured, kept_shares, marked, runs_of
from h2okv.cli.output import write_remark, write_text

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
        """Runs one command.

        Args:
            line: The line, slash included.

        Raises:
            ValueError: If there is no such command, or it cannot be done; the chat is unchanged.
            QuitChat: If the user wants to leave.
        """
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
    """Takes up a saved chat and says so on stderr.

    Args:
        chat: The chat; changed unless this fails.
        path: The file.

    Raises:
        ValueError: If the file is not a chat of this model.
    """
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
