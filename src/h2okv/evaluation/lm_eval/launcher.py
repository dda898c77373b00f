"""Runs lm-evaluation-harness."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from h2okv.config import CacheConfig

DATA_VARIABLE = "H2OKV_EVAL_DATA"
"""The environment variable that names the folder; ``h2okv lm-eval --data`` sets it."""
TASKS = Path(__file__).parent / "task_files"
"""The folder of the task files, for ``lm_eval --include_path``."""

MODEL = "h2okv"
_SUBCOMMANDS = ("run", "ls", "validate")
_FILES = {
    "copa": ("copa_balanced_dev.xml",),
    "rte": ("rte_val.jsonl",),
    "piqa": ("piqa/valid.jsonl", "piqa/valid-labels.lst"),
    "openbookqa": ("openbookqa_test.tsv", "openbookqa_dev.tsv"),
    "winogrande": ("llm_adapters/winogrande_test.json",),
    "mathqa": ("llm_adapters/mathqa_test.json",),
}
"""What each of this package's tasks reads from the data folder."""


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
    with data_folder(data):
        tasks = task_names(words)
        _check_early(words, tasks)
        own_only = bool(tasks) and all(name.startswith(f"{MODEL}_") for name in tasks)
        with _in_place_of(sys, "argv", ["lm_eval", *words]), _tasks_known(own_only):
            return _evaluate()


def data_file(name: str) -> Path:
    """Finds a data file of a task."""
    folder = os.environ.get(DATA_VARIABLE, "")
    if not folder:
        raise ValueError(
            f"this task reads {name!r}, and nothing says where it is; give h2okv lm-eval --data "
            f"DIR, or set the environment variable {DATA_VARIABLE}."
        )
    path = Path(folder) / name
    if not path.is_file():
        raise ValueError(
            f"the data file {name!r} is not in {folder!r}; put it there (docs/lm-eval.md says "
            "where it comes from) or name another folder by --data."
        )
    return path


@contextmanager
def data_folder(folder: Path | None) -> Iterator[None]:
    """Names the data folder to the tasks, where one is given."""
    before = os.environ.get(DATA_VARIABLE)
    if folder is not None:
        os.environ[DATA_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            os.environ.pop(DATA_VARIABLE)
            if before is not None:
                os.environ[DATA_VARIABLE] = before


def check_arguments(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuses names that look like one of a cache's."""
    for name in names:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        if near and name not in known:
            raise ValueError(f"model argument {name!r} is unknown; perhaps {near[0]!r} is meant.")


def _check_early(words: list[str], tasks: list[str]) -> None:
    """Refuses what is plainly wrong before the harness, and the model, are loaded."""
    if words[0] != "run":
        return
    if values_of(words, "--model", "-M") == [MODEL]:
        given = [part.partition("=")[0] for part in values_of(words, "--model_args", "-a")]
        elsewhere = ("--help", "-h", "--config", "-C")
        if "pretrained" not in given and not any(w.split("=")[0] in elsewhere for w in words):
            raise ValueError("--model_args names no model; add pretrained=bundled, or another one.")
        check_arguments(given, ("protocol", *(field.name for field in fields(CacheConfig))))
    for task, files in _FILES.items():
        if f"{MODEL}_{task}" in tasks or f"{MODEL}_tasks" in tasks:
            for name in files:
                data_file(name)


def _is_installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def _evaluate() -> int:
    from lm_eval.__main__ import cli_evaluate

    import h2okv.evaluation.lm_eval.model  # noqa: F401  registers the model type

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


def task_names(args: list[str]) -> list[str]:
    """The tasks asked for; where all are this package's, the harness's need not be listed."""
    return values_of(args, "--tasks", "-t")


def values_of(args: list[str], *names: str) -> list[str]:
    """What follows an option, taken apart at spaces and commas."""
    found: list[str] = []
    for place, word in enumerate(args):
        option, equals, value = word.partition("=")
        if option in names:
            rest = [value] if equals else list(takewhile(_is_value, args[place + 1 :]))
            found += [part for own in rest for part in own.split(",")]
    return found


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
