"""Runs lm-evaluation-harness."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from h2okv.evaluation.lm_eval.tasks import DATA_VARIABLE

TASKS = Path(__file__).parent / "task_files"
"""The folder of the task files, for ``lm_eval --include_path``."""

MODEL = "h2okv"
_SUBCOMMANDS = ("run", "ls", "validate")


def run_harness(args: Sequence[str], data: Path | None = None) -> int:
    """Registers model and tasks and hands over to the harness's own command line.

    Releases up to 0.4.13 look for no models outside themselves, and read ``--include_path`` when
    the model has been looked up already.
    """
    if not _is_installed():
        raise ValueError(
            "lm-evaluation-harness is not installed; run pip install 'h2okv[eval]' first."
        )
    if data is not None and not data.is_dir():
        raise ValueError(f"--data {str(data)!r} is no folder; name the one with the data files.")
    words = completed(list(args))
    own_only = names_own_tasks(words)
    with _in_place_of(sys, "argv", ["lm_eval", *words]), _tasks_known(own_only):
        before = os.environ.get(DATA_VARIABLE)
        if data is not None:
            os.environ[DATA_VARIABLE] = str(data)
        try:
            return _evaluate()
        finally:
            if data is not None:
                os.environ.pop(DATA_VARIABLE)
                if before is not None:
                    os.environ[DATA_VARIABLE] = before


def _is_installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def _evaluate() -> int:
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"lm_eval: {error.args[0] if error.args else error}") from error
    return 0


def completed(args: list[str]) -> list[str]:
    """Adds the subcommand and the model type where they are left out."""
    if not args or args[0] in ("-h", "--help") or args[0] in _SUBCOMMANDS[1:]:
        return args or ["--help"]
    if args[0] != "run":
        args = ["run", *args]
    names = ("--model", "-M", "--config", "-C")
    if not any(word.split("=")[0] in names for word in args):
        args = [args[0], "--model", MODEL, *args[1:]]
    return args


def names_own_tasks(args: list[str]) -> bool:
    """Tells whether all tasks asked for are this package's; the harness's take seconds to list."""
    names: list[str] = []
    for place, word in enumerate(args):
        option, equals, value = word.partition("=")
        if option in ("--tasks", "-t"):
            rest = [value] if equals else list(takewhile(_is_value, args[place + 1 :]))
            names += [name for part in rest for name in part.split(",")]
    return bool(names) and all(name.startswith(f"{MODEL}_") for name in names)


def _is_value(word: str) -> bool:
    return not word.startswith("-")


@contextmanager
def _tasks_known(own_only: bool) -> Iterator[None]:
    """Lets the harness find the six tasks beside its own and the user's."""
    import lm_eval.tasks

    class Tasks(lm_eval.tasks.TaskManager):
        """The harness's tasks and ours; an unknown name is an error with the nearest ones."""

        def __init__(self, *args: Any, include_path: Any = None, **options: Any) -> None:
            others = include_path if isinstance(include_path, (list, tuple)) else [include_path]
            paths = [TASKS, *(path for path in others if path)]
            if own_only:
                options["include_defaults"] = False
            super().__init__(*args, include_path=paths, **options)

        def match_tasks(self, task_list: list[str]) -> list[str]:
            found = super().match_tasks(task_list)
            if not found and not all(Path(name).exists() for name in task_list):
                near = difflib.get_close_matches(task_list[0], self.all_tasks, n=3)
                hint = f"did you mean {', '.join(near)}? " if near else ""
                raise ValueError(
                    f"--tasks {task_list[0]!r} is unknown; {hint}`h2okv lm-eval ls tasks` lists "
                    "all."
                )
            return found

    with _in_place_of(lm_eval.tasks, "TaskManager", Tasks):
        yield


@contextmanager
def _in_place_of(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
