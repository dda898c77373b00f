"""lm-evaluation-harness with H2O caches: settings, task files of a folder, its command line."""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from h2okv.cache_spec import parse
from h2okv.cli.args import check_names
from h2okv.config import CacheConfig
from h2okv.console import optional
from h2okv.models.names import check_name

MODEL = "h2okv"
# The arguments of the model type that the harness does not know.
SETTINGS = ("cache", "protocol", *(field.name for field in fields(CacheConfig)))


def data_file(name: str, folder: Path | None) -> Path:
    """Return the path of a data file in a folder."""
    if folder is None:
        raise ValueError(f"{name!r} is read from a data folder; give --data DIR")
    path = folder / name
    if not path.is_file():
        raise ValueError(
            f"the data file {name!r} is not in '{folder}'; put it there (docs/results/paper.md "
            "lists the sources) or name another folder by --data."
        )
    return path


def check_arguments(names: Iterable[str]) -> None:
    """Raise ValueError for an unknown name that resembles one of `SETTINGS`."""
    for name in names:
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.7)
        if near and name not in SETTINGS:
            raise ValueError(f"model argument {name!r} is unknown; perhaps {near[0]!r} is meant.")


def run_harness(args: Sequence[str], data: Path | None = None) -> int:
    """Run lm-evaluation-harness's command with this package's model type and tasks."""
    command = optional("lm_eval._cli", "h2okv lm-eval")
    words = list(args)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    try:
        with patch.object(sys, "argv", ["lm_eval", *words]):
            parsed = command.HarnessCLI().parse_args()
        if parsed.command == "run":
            _check_early(parsed)
        _evaluate(parsed, data)
    except SystemExit as exit_error:  # after its help, or with its own message
        code = exit_error.code
        return code if isinstance(code, int) else int(code is not None)
    return 0


def _check_early(parsed: Namespace) -> None:
    """Refuse wrong arguments before the harness and the model are loaded."""
    if not parsed.config:
        parsed.model = parsed.model or MODEL
    if parsed.model == MODEL:
        arguments = dict(parsed.model_args or {})
        if "pretrained" not in arguments and not parsed.config:
            raise ValueError("--model_args must name a model; add pretrained=bundled or another.")
        check_arguments(arguments)
        if "pretrained" in arguments:
            check_name(arguments["pretrained"])
        arguments |= parse(arguments["cache"]) if "cache" in arguments else {}
        check_names(arguments.get("policy", "h2o"), arguments.get("scoring"), per_query=True)


def _evaluate(parsed: Namespace, data: Path | None) -> None:
    import lm_eval.tasks
    from lm_eval.utils import setup_logging

    import h2okv_lab.evaluation.lm_eval.model  # noqa: F401  registers the model type

    setup_logging()
    tasks = getattr(parsed, "tasks", None) or ()
    tasks = tasks.split(",") if isinstance(tasks, str) else tasks  # as `validate` has them
    try:
        with patch.object(lm_eval.tasks, "TaskManager", task_manager(data, tasks, "--tasks")):
            parsed.func(parsed)
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"lm_eval: {error.args[0] if error.args else error}") from error


def task_manager(data: Path | None, names: Sequence[str], option: str) -> Any:
    """Return a class of task managers for which a folder's tasks come before the harness's.

    The harness's own are listed only if one of ``names`` is not in the folder: that takes seconds.
    The error for an unknown name, of ``option``, suggests similar ones.
    """
    import lm_eval.tasks

    class Tasks(lm_eval.tasks.TaskManager):
        """The harness's task manager, for these folders and names."""

        def __init__(self, *args: Any, include_path: Any = None, **options: Any) -> None:
            others = include_path if isinstance(include_path, (list, tuple)) else [include_path]
            options |= {"include_path": [*filter(None, (*others, data))]}
            super().__init__(*args, **options | {"include_defaults": False})
            if not names or not {*names} <= {*self.all_tasks}:
                super().__init__(*args, **options)

        def match_tasks(self, task_list: list[str]) -> list[str]:
            matches = super().match_tasks(task_list)
            if not matches and not all(Path(name).exists() for name in task_list):
                near = difflib.get_close_matches(task_list[0], self.all_tasks, n=3)
                hint = f"did you mean {', '.join(near)}? " if near else ""
                problem = f"{option} {task_list[0]!r} is unknown"
                raise ValueError(f"{problem}; {hint}`h2okv lm-eval ls tasks` lists all.")
            return matches

    return Tasks
