"""The command line: its commands, and the output of those that fail."""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import pkgutil
import re
import signal
import sys
import threading
import warnings
from collections.abc import Container, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

import h2okv
from h2okv.cli.commands import COMMANDS, helps
from h2okv.console import (
    BAD_INPUT,
    INTERRUPTED,
    OUTPUT_CLOSED,
    OutputClosedError,
    output_closed,
    write_remark,
    write_text,
)


class LazyGroup(TyperGroup):
    """A group that lists commands without importing them, and imports the one that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, remaining = super().resolve_command(ctx, args)
        if name in ("chat", "generate"):  # where --verify alone is a flag
            remaining = [
                word + "=answer" * (word == "--verify" and not get_close_matches(after, _REPAIRS))
                for word, after in zip_longest(remaining, remaining[1:], fillvalue="")
            ]
        return name, command and load_command(str(name)), remaining

    def invoke(self, ctx: Any) -> Any:
        """Run the command; report Ctrl-C where the command does not (typer would be silent)."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            write_remark(str(stop) or "h2okv: interrupted.")
            return INTERRUPTED


def load_command(name: str) -> Any:
    from h2okv.cli import args, help_page

    app = pkgutil.resolve_name(COMMANDS[name])
    if not isinstance(app, typer.Typer):
        function = app
        is_foreign = name == "lm-eval"  # the harness parses its options
        settings = {"allow_extra_args": is_foreign, "ignore_unknown_options": is_foreign}
        app = typer.Typer(add_completion=False)
        register = app.command(name, help=helps()[name], context_settings=settings)
        register(args.expand(function))
    command = typer.main.get_command(app)
    command.name = name
    help_page.show_types(command)
    return command


_app = typer.Typer(name="h2okv", cls=LazyGroup, pretty_exceptions_enable=False)


def _show_version(value: bool) -> None:
    if value:
        write_text(f"h2okv {h2okv.__version__}\n")
        raise typer.Exit


@_app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Heavy-Hitter Oracle (H2O) KV-cache eviction for Hugging Face models."""


for _name in COMMANDS:
    _app.command(_name, help=helps()[_name].partition("\n")[0])(lambda: None)


def main() -> NoReturn:
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # outside a command
        write_remark("h2okv: interrupted.")
        code = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while libraries end needs no traceback
    if any(thread.daemon for thread in threading.enumerate()):
        # A thread in the middle of a forward would abort the process when the interpreter ends.
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            output.flush()
        os._exit(code)
    sys.exit(code)


def run(args: Sequence[str]) -> int:
    _share_cores()
    _quieten_libraries()
    try:
        if not args and "_H2OKV_COMPLETE" not in os.environ:  # a shell that completes a line
            write_text(helps()["h2okv"])
            return 0
        _check_spaces(args)
        code = _app(args=list(args), prog_name="h2okv", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(_replaced(error, args) or _usage(error, args))
    except (OutputClosedError, OSError) as error:
        if isinstance(error, OSError):  # of rich's help; commands name the file that they write
            if error.errno != errno.ENOSPC:
                raise
            error = output_closed(error)
        # The interpreter flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED if isinstance(error.__cause__, BrokenPipeError) else _fail(str(error))
    except SystemExit as error:  # rich's, if its help is not read, or that of a completion
        return OUTPUT_CLOSED if error.code == 1 else int(error.code or 0)
    except ValueError as error:
        return _fail(_with_option(error, {arg.partition("=")[0] for arg in args}))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; torch may not be imported
            raise
        return _fail(
            f"the device is out of memory ({error}); choose a smaller model, a shorter prompt or"
            " --dtype bfloat16"
        )
    return code if isinstance(code, int) else 0


# An argument of functions and of `plan`, an option of the other commands.
_MODEL = re.compile(r"(?:^|(?<=of )|(?<=and )|(?<=which ))model (?=['\"]|is empty)")


def _with_option(error: ValueError, options: Container[str]) -> str:
    """Return an error's message, which names an argument, with the option that the user gave."""
    from h2okv.prompts.readers import FieldError

    message = str(error)
    if isinstance(error, FieldError) and error.path:
        argument = str(error.path[0])
        option = f"--{_OTHER_NAMES.get(argument, argument).replace('_', '-')}"
        if option in options:
            problem = f" {error.problem[1:]}" if error.problem.startswith("=") else error.problem
            message = f"{FieldError((option, *error.path[1:]), '').name}{problem}"
    return _MODEL.sub("--model ", message) if "--model" in options else message


_REPAIRS = ("repair", "repair_all")
_OTHER_NAMES = {"max_tokens": "max_new_tokens"}
_UNITS = {"--budget": r"%[\d.,%+]*", **dict.fromkeys(("--memory", "--max-body"), r"(?i:[KMGT]i?B)")}


def _check_spaces(args: Sequence[str]) -> None:
    """Raise ValueError for an amount that a space separates from its unit."""
    words = [word for arg in args for word in arg.split("=", 1)]
    for option, number, unit in zip(words, words[1:], words[2:], strict=False):
        if option not in _UNITS or not re.fullmatch(_UNITS[option], unit):
            continue
        if re.fullmatch(r"[\d.,%+]*\d", number):
            raise ValueError(
                f"'{number} {unit}' of {option} is two arguments; leave out the space, as in"
                f" {option} {number}{unit}"
            )


def _share_cores() -> None:
    """Let OpenMP's threads sleep soon after their work; read when torch is imported.

    They would spin for milliseconds, which other processes on the same cores pay for, and in turn
    this one: each operation waits for all of its threads.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _quieten_libraries() -> None:
    """Silence libraries on stderr; they read these variables when they are imported."""
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # it has read the variables already
        logging = importlib.import_module("transformers.utils.logging")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for output in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a crash.
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="replace")


# Options that one might expect, and what says the same: by the option, or the command and the
# option. {} stands for the value that the user gave.
_REPLACED = {
    "--heavy": "--budget with heavy+recent, such as --budget 64+64",
    "--recent": "--budget with heavy+recent, such as --budget 64+64",
    "--sink": "--cache sink={}",
    "--scoring": "--cache scoring={}",
    "--positions": "--cache positions={}",
    "--evict-every": "--cache every={}",
    "--kv-bits": "--cache bits={}",
    "--layer-budgets": "--cache layers={}",
    "--seed": "--cache random:20%,seed={}",
    "--device": "the environment variable H2OKV_DEVICE={}",
    "--gpu-memory": "--memory {}",
    "--batch-size": "--batch {}",
    "--max-batch": "--memory alone, which finds the largest batch",
    "--threads": "the environment variable OMP_NUM_THREADS={}",
    "--min-p": "the model's generation config, or min_p of h2okv.SamplingParams",
    "serve --prefix": "nothing in its place: the first prompts that begin so leave their states",
    "serve --system": "nothing in its place: the first chats that begin so leave their states",
    "plan --serve": "h2okv serve --dry-run",
    **dict.fromkeys(
        ("--top-p", "--top-k", "--repetition-penalty", "--stop"),
        "the model's generation config, or a field of a line of h2okv batch --input",
    ),
}


def _replaced(error: Any, args: Sequence[str]) -> str | None:
    """Return the message for an option that a command does not have, if one might expect it."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None:
        return None
    command = context.command_path
    new = _REPLACED.get(f"{command.rpartition(' ')[2]} {option}") or _REPLACED.get(option)
    if new is None:
        return None
    value = re.search(rf"(?:^|\0){re.escape(option)}[=\0]([^\0]*)", "\0".join(args))
    remedy = new.format(value[1] if value else "...")
    return f"{option} is gone; give {remedy}; see {command} --help"


def _usage(error: typer.TyperException, args: Sequence[str]) -> str:
    """Return the message of a usage error, with the --help to read."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    path = context.command_path if context else " ".join(["h2okv", *COMMANDS.keys() & args[:1]])
    option = str(getattr(error, "option_name", ""))
    params = [] if context is None else context.command.params
    names = [p.metavar or p.name for p in params if p.param_type_name == "argument"]
    if option.removeprefix("--").upper() in names:
        message = f"{option} is no option of this command: give its value alone"
    takes_share = args[:1] == ["serve"]
    if "extra argument" in message and "--verify" in args and not takes_share:
        message = f"{message.rstrip('.')}; --verify takes no value but repair or repair_all"
    return f"{message.rstrip('.')}{' See' if message.endswith('?') else '; see'} {path} --help"


def _fail(message: str) -> int:
    print(f"h2okv: {' '.join(message.split()).rstrip('.')}.", file=sys.stderr)
    return BAD_INPUT
