"""Runs all measurements."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import h2okv
from h2okv.analysis.measurements import MEASUREMENTS, Measurement
from h2okv.analysis.study import Sample, Study
from h2okv.records import write_csv

SETTINGS_FILE = "settings.json"
_KEPT_FOLDER = "working"

TEXT_COLUMNS = ("word", "policy", "condition", "case", "of", "against", "measure", "h", "objective")
"""Columns of the tables that hold text, even where it reads as a number (a word may be "7")."""

OnProgress = Callable[[Measurement, float], None]
"""Is told which measurement runs and which share of it is done."""


def open_folder(folder: Path, model_name: str, text: str, tokens: int) -> None:
    """Makes a report's folder, or enters one that an earlier run of the same kind has left."""
    settings = {
        "model": model_name,
        "text_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "tokens": tokens,
        "h2okv": h2okv.__version__,
    }
    path = folder / SETTINGS_FILE
    try:
        (folder / _KEPT_FOLDER).mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"'{folder}' cannot be written ({error.strerror}); choose another folder for the "
            "report."
        ) from error
    found = read_settings(folder)
    different = [key for key, value in settings.items() if found.get(key) != value]
    if different:
        raise ValueError(
            f"'{folder}' holds an analysis with another {' and '.join(different)}; choose another "
            "folder for the report, or delete this one."
        )


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads what a report's folder is about."""
    path = folder / SETTINGS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{path}' cannot be read ({type(error).__name__}); choose another folder for the "
            "report, or delete this one."
        ) from error
    return dict(found)


def finished(folder: Path, measurement: Measurement) -> bool:
    """Tells whether all tables of a measurement are there."""
    return all((folder / f"{table}.csv").is_file() for table in measurement.tables)


def analyze(
    model: PreTrainedModel,
    sample: Sample,
    folder: Path,
    with_neurons: bool = False,
    on_progress: OnProgress = lambda measurement, share: None,
) -> None:
    """Runs every measurement whose tables are not in the folder yet, and writes them there.

    After an interruption the same call goes on: finished tables stay, and so do the runs over the
    text that several measurements share.
    """
    study = Study(model, sample, folder / _KEPT_FOLDER)
    for measurement in MEASUREMENTS:
        if measurement.is_option and not with_neurons:
            continue
        if not finished(folder, measurement):
            on_progress(measurement, 0.0)
            tables = measurement.run(study, partial(on_progress, measurement))
            for name, rows in tables.items():
                write_csv(folder / f"{name}.csv", rows)
        on_progress(measurement, 1.0)
