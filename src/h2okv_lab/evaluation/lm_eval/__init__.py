"""lm-evaluation-harness with H2O caches: settings, data files of our tasks, its command line."""

from __future__ import annotations

import difflib
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from h2okv.cache_spec import parse
from h2okv.cli.args import check_names
from h2okv.config import CacheConfig
from h2okv.console import optional
from h2okv.models.names import check_name

DATA_VARIABLE = "H2OKV_EVAL_DATA"  # names the data folder; ``h2okv lm-eval --data`` sets it
TASKS = Path(__file__).parent / "task_files"  # for ``lm_eval --include_path``
MODEL = "h2okv"
PREFIX = f"{MODEL}_"  # of the names of this package's tasks
# The files in the data folder that this package's tasks need.
FILES = {
    "copa": ("copa_balanced_dev.xml",),
    "rte": ("rte_val.jsonl",),
    "piqa": ("piqa/valid.jsonl", "piqa/valid-labels.lst"),
    "openbookqa": ("openbookqa_test.tsv", "openbookqa_dev.tsv"),
    "winogrande": ("llm_adapters/winogrande_test.json",),
    "mathqa": ("llm_adapters/mathqa_test.json",),
}
# The arguments of the model type that the harness does not know.
SETTINGS = ("cache", "protocol", *(field.name for field in fields(CacheConfig)))


def data_file(name: str, folder: Path | None = None) -> Path:
    """Return the path of a task's data file, by default in the folder of `DATA_VARIABLE`."""
    root = folder or os.environ.get(DATA_VARIABLE, "")
    if not root:
        raise ValueError(
            f"this task reads {name!r} from a data folder, and none is set; give "
            f"--data DIR, or set the environment variable {DATA_VARIABLE}."
        )
    path = Path(root) / name
    if not path.is_file():
        raise ValueError(
            f"the data file {name!r} is not in '{root}'; put it there (docs/results/paper.md "
            "lists the sources) or name another folder by --data."
        )
    return path


def check_arguments(names: Iterable[str]) -> None:
    """Raise ValueError for an unknown name that resembles one of `SETTINGS`."""
    for name in names:
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.7)
        if near and name not in SETTINGS:
            raise ValueError(f"model argument {name!r} is unknown; perhaps {near[0]!r} is meant.")


def data_folder(folder: Path | None) -> AbstractContextManager[Any]:
    """Set `DATA_VARIABLE` to the folder if there is one."""
    return patch.dict(os.environ, {} if folder is None else {DATA_VARIABLE: str(folder)})


def run_harness(args: Sequence[str], data: Path | None = None) -> int:
    """Run lm-evaluation-harness's command with this package's model type and tasks."""
    command = optional("lm_eval._cli", "h2okv lm-eval")
    words = list(args)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    try:
        with patch.object(sys, "argv", ["lm_eval", *words]):
            parsed = command.HarnessCLI().parse_args()
        with data_folder(data):
            if parsed.command == "run":
                _check_early(parsed)
            _evaluate(parsed)
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
    for task, files in FILES.items():
        if {f"{PREFIX}{task}", f"{PREFIX}tasks"} & set(parsed.tasks or ()):
            for name in files:
                data_file(name)


def _evaluate(parsed: Namespace) -> None:
    from lm_eval.utils import setup_logging

    import h2okv_lab.evaluation.lm_eval.model  # noqa: F401  registers the model type

    setup_logging()
    tasks = getattr(parsed, "tasks", None) or ()
    tasks = tasks.split(",") if isinstance(tasks, str) else tasks  # as `validate` has them
    # The harness lists its own tasks only if one of them may be needed: that takes seconds.
    ours_only = bool(tasks) and all(name.startswith(PREFIX) for name in tasks)
    try:
        with _task_manager(ours_only):
            parsed.func(parsed)
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"lm_eval: {error.args[0] if error.args else error}") from error


def _task_manager(ours_only: bool) -> AbstractContextManager[Any]:
    """Patch the harness's task manager, which then finds this package's tasks too."""
    import lm_eval.tasks

    class Tasks(lm_eval.tasks.TaskManager):
        """The harness's tasks and ours; the error for an unknown name suggests similar ones."""

        def __init__(self, *args: Any, include_path: Any = None, **options: Any) -> None:
            others = include_path if isinstance(include_path, (list, tuple)) else [include_path]
            options.setdefault("include_defaults", not ours_only)
            super().__init__(*args, include_path=[TASKS, *filter(None, others)], **options)

        def match_tasks(self, task_list: list[str]) -> list[str]:
            matches = super().match_tasks(task_list)
            if not matches and not all(Path(name).exists() for name in task_list):
                near = difflib.get_close_matches(task_list[0], self.all_tasks, n=3)
                hint = f"did you mean {', '.join(near)}? " if near else ""
                problem = f"--tasks {task_list[0]!r} is unknown"
                raise ValueError(f"{problem}; {hint}`h2okv lm-eval ls tasks` lists all.")
            return matches

    return patch.object(lm_eval.tasks, "TaskManager", Tasks)
