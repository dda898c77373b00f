"""Where the tasks' data files are: a folder that the user names."""

from __future__ import annotations

import os
from pathlib import Path

DATA_VARIABLE = "H2OKV_EVAL_DATA"
"""The environment variable that names the folder; ``h2okv lm-eval --data`` sets it."""


def data_file(name: str) -> Path:
    """Finds a data file of a task.

    Args:
        name: its path inside the folder.

    Returns:
        The file.

    Raises:
        ValueError: if there is no folder or no such file, naming both.
    """
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
