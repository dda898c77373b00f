"""lm-evaluation-harness with H2O caches: its model type's settings, our tasks' data files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from h2okv.config import CacheConfig

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
