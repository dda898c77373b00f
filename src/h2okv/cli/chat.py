"""`h2okv chat`."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import h2okv
from h2okv.cli import args, readers
from h2okv.cli.args import option
from h2okv.cli.commands import helps
from h2okv.config import SPAN, CacheConfig
from h2okv.console import INTERRUPTED, OutputClosedError, write_remark, write_text
from h2okv.prompts.chat_template import check_pinnable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from h2okv.engine.chat import Chat
    from h2okv.engine.generation import Generation

_COMMANDS = ("/help", "/cache", "/undo", "/retry", "/save", "/load", "/reset", "/quit")
_BLOCK_MARK = '"""'
_PROMPT, _MORE = "> ", "... "
ReadLine = Callable[[str], str | None]


def saved_chat(option: str, path: Path) -> Path:
    """Return the path of a saved chat; raise ValueError if its first bytes are not of /save."""
    file_path = readers.readable(option, path)
    with file_path.open("rb") as file:
        start = file.read(9)
    if start[8:] != b"{":  # a safetensors file: the length of a JSON header, and the header
        raise ValueError(f"{option} '{path}' is not a saved chat; give a file that /save wrote")
    return file_path


def chat(
    choice: args.Choice = args.cache_options("512"),
    model: args.ModelOptions = args.model_options(),
    sampling: args.SamplingOptions = args.sampling_options(256),
    system: str = option("", "System message: text or @FILE.", read=readers.text_or_file),
    pin: args.Typed = args.PIN,
    compile: bool = args.COMPILE,
    weight_bits: int | None = args.WEIGHT_BITS,
    load: Path | None = option(None, "Continue a saved chat.", read=saved_chat),
    verify: args.Typed = args.VERIFY,
) -> int:
    check_pinnable(pin)
    cache, evict_every = choice.apart_from_cuts()
    positions = cache.positions if "positions" in choice.named else "auto"
    cache = replace(cache, positions="original")
    _check_options(cache, verify, system, load)
    from h2okv.calibration.layer_budgets import with_measured_budgets
    from h2okv.engine.chat import Chat, read_chat

    described = model.describe()
    params = sampling.params(described)
    cache, remark = plan_cache(described.config, cache, positions, evict_every)
    if load is not None:
        read_chat(load, described.config)  # mistakes show before the weights load
    loaded = model.load(described, compile, weight_bits)
    with h2okv.enable(loaded, compile=compile):
        if positions == "auto" and remark is None:
            cache, remark = probe_positions(loaded, cache)
        cache = with_measured_budgets(cache, loaded, described)
        if pin:
            cache = cache.with_room_for_pins
        h2o_cache = h2okv.H2OCache.from_config(loaded, cache.seeded(int(params.seed or 0)))
        session = Chat(loaded, described, params, h2o_cache, system, pin, verify)
        if load is not None:
            load_and_report(session, load)
        elif remark:
            write_remark(remark)
        if sys.stdin.isatty():
            write_remark(greeting(session))
        return converse(session, open_stdin())


def _check_options(cache: CacheConfig, verify: Any, system: str, load: Path | None) -> None:
    """Raise ValueError for options that an endless text cannot have."""
    if isinstance(verify, str):
        raise ValueError(
            f"--verify {verify} makes one answer again, and a chat reads its answers on; give"
            " --verify alone, or use generate or serve"
        )
    if load is not None and system:
        raise ValueError(
            "--system has no effect with --load, which restores the chat's own; omit it"
        )
    if cache.policy == "snapkv":
        raise ValueError(
            "--policy snapkv chooses tokens once, at the end of one prompt, and a chat has many"
            " turns; choose best or h2o"
        )
    for name in ("heavy", "recent"):
        amount = getattr(cache, name)
        if isinstance(amount, float) and not (cache.is_full or cache.grows):
            reason = f"a budget of {cache.budget_label} is a fraction of a prompt, but a chat has"
            raise ValueError(f"{reason} no end; give tokens, such as --budget 512")


def plan_cache(
    config: PreTrainedConfig,
    cache: CacheConfig,
    positions: Any,
    evict_every: int | str | None = None,
) -> tuple[CacheConfig, str | None]:
    """Return the cache with positions and blocks set, and a note if positions stay original.

    It evicts where a server's does, unless that has no place in the context or with other options.
    """
    from h2okv.cache.linear_states import continues_prompts
    from h2okv.cache.support import can_score_spans, context_window

    is_auto = positions == "auto"
    args.check_cache(config, cache)
    cache, remark = replace(cache, positions="rolling" if is_auto else positions), None
    try:
        args.check_cache(config, cache)
    except ValueError as error:
        if not is_auto:
            raise
        cache, remark = _with_original(cache, error)
    entries, window = cache.budget.resolve(0).total, context_window(config)
    fits = window is None or entries + SPAN <= window
    if evict_every is None and not cache.is_full and can_score_spans(cache):
        # In a small window shorter spans leave the room to the text.
        evict_every = SPAN if fits else max(1, min(entries // 4, (window or 0) - entries))
    cache = cache.cut_every(evict_every)
    if reason := cache.past_window(entries, cache.span, window):
        raise ValueError(reason)
    args.check_cache(config, cache)
    if not continues_prompts(h2okv.H2OCache.from_config(config, cache.before_measuring)):
        raise ValueError(
            f"model type {config.model_type!r} cannot chat: its linear layers forget their states"
            " in transformers when a second turn follows; use h2okv serve, which reads the whole"
            " chat for each answer"
        )
    return cache, remark


def probe_positions(model: PreTrainedModel, cache: CacheConfig) -> tuple[CacheConfig, str | None]:
    """Run one token to find out whether positions can roll; a config does not show everything."""
    import torch

    from h2okv.cache.argument import CACHE
    from h2okv.integration.enable import input_device

    token = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
    try:
        with torch.no_grad():
            even = replace(cache, layer_budgets=None)
            model(token, **{CACHE: h2okv.H2OCache.from_config(model.config, even)})
    except ValueError as error:
        if "positions=" not in str(error):
            raise
        return _with_original(cache, error)
    return cache, None


def _with_original(cache: CacheConfig, error: ValueError) -> tuple[CacheConfig, str]:
    reason = str(error).rstrip(".")
    remark = f"note: positions stay original, so the chat ends with the model's context ({reason})"
    return replace(cache, positions="original"), remark


def run_command(session: Chat, line: str) -> None:
    """Run a line that begins with a slash."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if name not in _COMMANDS:
        close = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}" if close else "/help lists the commands"
        block = 'put a message that begins with / between two lines of """'
        raise ValueError(f"{name!r} is not a command; {hint} ({block})")
    if name in ("/save", "/load") and not argument:
        raise ValueError(f"{name} needs a file, such as {name} evening.chat")
    if name == "/help":
        write_text(helps()["/help"])
    elif name == "/cache":
        show_cache(session, argument)
    elif name == "/undo":
        session.undo()
        write_remark("the last turn is taken back")
    elif name == "/retry":
        _answer(session, session.undo())
    elif name == "/load":
        load_and_report(session, Path(argument).expanduser())
    elif name == "/save":
        path = Path(argument).expanduser()
        session.save(path)
        write_remark(f"saved to '{path}'")
    else:
        session.reset()
        write_remark("a new chat")


def load_and_report(session: Chat, path: Path) -> None:
    """Continue a saved chat and report it on stderr."""
    saved = session.load(path)
    turns = sum(message["role"] == "user" for message in saved.transcript.messages)
    cache = session.cache
    write_remark(
        f"'{path}': {turns} {'turn' if turns == 1 else 'turns'}, {cache.num_seen_tokens:,} tokens"
        f" read, {cache.num_cached_tokens:,} held; {cache!r}"
    )


def show_cache(session: Chat, argument: str) -> None:
    from rich.console import Console

    from h2okv.engine.chat import kept_shares, render_kept

    words = argument.split()
    if len(words) > 2:
        raise ValueError(f"/cache {argument} has too many words; give /cache [LAYER [HEAD]]")
    try:
        indices = [int(word) for word in words]
    except ValueError:
        raise ValueError(f"{argument!r} is not a number; give /cache [LAYER [HEAD]]") from None
    token_ids, tokenizer = session.transcript.token_ids, session.described.tokenizer
    if not token_ids:
        raise ValueError("there is nothing in the cache yet; send a message first")
    shares = kept_shares(session.cache, *indices)
    console = Console(file=sys.stdout, highlight=False)
    if console.color_system is None or console.no_color:
        write_text(f"{render_kept(tokenizer, token_ids, shares, with_marks=True)}\n")
    else:
        console.print(render_kept(tokenizer, token_ids, shares))


class Entry(NamedTuple):
    """A message, or a command: a single line that begins with a slash, outside a block."""

    text: str
    is_command: bool


def read_entry(read_line: ReadLine) -> Entry | None:
    """Read one entry: a line, or a block between two marks; ``None`` at the end."""
    line = read_line(_PROMPT)
    if line is None:
        return None
    lines: list[str] = []
    if is_block := line.strip() == _BLOCK_MARK:
        # The end of the input ends a block too; its text is not lost.
        while (line := read_line(_MORE)) is not None and line.strip() != _BLOCK_MARK:
            lines.append(line)
    else:
        lines.append(line)
    for number, line in enumerate(lines, start=1):
        if any("\ud800" <= letter <= "\udfff" for letter in line):  # invalid bytes
            location = f"line {number} of the input" if len(lines) > 1 else "the line"
            raise ValueError(f"{location} is not UTF-8 text; convert it to UTF-8")
    text = "\n".join(lines)
    return Entry(text, is_command=not is_block and text.startswith("/") and len(lines) == 1)


def open_stdin() -> ReadLine:
    """Return a function that reads lines of stdin; a terminal gets line editing and prompts."""
    if hasattr(sys.stdin, "reconfigure"):
        # Invalid bytes are refused in the entry that has them, not here.
        sys.stdin.reconfigure(errors="surrogateescape")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  importing it gives input() editing and history

    def read(prompt: str) -> str | None:
        if not is_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            if sys.stdout.isatty():
                return input(prompt)
            print(prompt, end="", file=sys.stderr, flush=True)
            return input()
        except EOFError:
            print(file=sys.stderr)  # ends the line of the prompt
            return None

    return read


def greeting(session: Chat) -> str:
    """Return the lines that introduce model and cache before the first turn."""
    name, cache = session.described.name, session.cache
    dtype = str(session.model.dtype).removeprefix("torch.")
    template, budget = "its own chat template", cache.budget
    label = replace(cache.cache_config, positions="original").policy_label  # which comes last
    if session.form.is_plain:
        template = "a plain dialogue, as it has no chat template"
        if name == args.BUNDLED:
            template = "a plain dialogue; it writes book-like English and is not an assistant"
    return (
        f"{name}, {dtype} on {session.model.device}: {template}\n"
        f"cache: {label}, sink {budget.sink} + heavy {budget.heavy} +"
        f" recent {budget.recent} tokens, positions {cache.position_rule.positions}\n"
        "/help lists the commands"
    )


def converse(session: Chat, read_line: ReadLine) -> int:
    """Process entries until the input ends or the user leaves; report the errors of each."""
    import torch

    leaving = False
    while True:
        try:
            entry = read_entry(read_line)
            leaving = False
            if entry is None or (entry.is_command and entry.text.split()[0] == "/quit"):
                return 0
            if entry.is_command:
                run_command(session, entry.text)
            elif entry.text.strip():
                _answer(session, entry.text)
        except KeyboardInterrupt:
            if leaving:
                return INTERRUPTED
            leaving = True
            write_remark("\n(Ctrl-C again leaves)")
        except OutputClosedError:
            raise
        except torch.OutOfMemoryError:
            write_remark("the device is out of memory; write less, or start with a smaller budget.")
        except (ValueError, OSError) as error:
            write_remark(f"{' '.join(str(error).split()).rstrip('.')}.")


def _answer(session: Chat, message: str) -> None:
    """Stream an answer, followed by a line on its cost."""
    from rich.console import Console

    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        write_text(piece)

    before = session.transcript
    try:
        answer = session.say(message, write, show_progress=True)
    finally:
        if pieces:
            write_text("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(status_line(session, answer), style="dim", markup=False)
    if answer.verified is not None:
        console.print(str(answer.verified), style="dim", markup=False)
    if session.transcript is before:
        problem = "the model was interrupted in the middle of a token"
        write_remark(f"{problem}, so the turn is taken back.")


def status_line(session: Chat, answer: Generation) -> str:
    """Return the line on an answer's cost: tokens kept, memory, speed and ending."""
    cache = session.cache
    first, speed = answer.time_to_first_token, answer.tokens_per_second
    waiting = len(session.transcript.token_ids) - cache.num_seen_tokens - len(answer.token_ids)
    unread = f", {waiting:,} tokens of the turn are read with the next one" if waiting > 0 else ""
    endings = {
        "length": f" | cut at --max-new-tokens {session.params.max_tokens}",
        "context": " | cut, the context is full",
        "interrupted": f" | stopped{unread}",
    }
    return (
        f"{answer.kept_text} | {answer.memory_text}"
        f"{'' if speed is None else f' | {speed:.1f} tokens/s'}"
        f" | {'no token' if first is None else f'first after {first:.2f} s'}"
        f"{endings.get(answer.finish_reason, '')}"
    )
