"""Runs measurements into a folder, which a stopped run goes on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import h2okv
from h2okv.analysis.measurements import MEASUREMENTS, Measurement
from h2okv.analysis.study import Sample, Study
from h2okv.records import unknown_name, write_csv, write_json

SETTINGS_FILE = "settings.json"
_KEPT_FOLDER = "working"

TEXT_COLUMNS = ("word", "policy", "condition", "case", "of", "against", "measure", "h", "objective")
"""Columns of the tables that hold text, even where it reads as a number (a word may be "7")."""

OnProgress = Callable[[Measurement, float], None]
"""Is told which measurement runs and which fraction of it is done."""


def choose_measurements(
    only: Sequence[str] = (), quick: bool = False, neurons: bool = False
) -> tuple[Measurement, ...]:
    """Finds the measurements that the options name."""
    by_name = {measurement.name: measurement for measurement in MEASUREMENTS}
    for name in only:
        if name not in by_name:
            raise unknown_name("--only: measurement", name, by_name)
    if only and quick:
        raise ValueError("--only and --quick both choose measurements; give one of them")
    wanted = set(only) or {m.name for m in MEASUREMENTS if not m.is_option}
    if quick:
        wanted = {m.name for m in MEASUREMENTS if m.is_quick}
    if neurons:
        wanted |= {m.name for m in MEASUREMENTS if m.is_option}
    return tuple(measurement for measurement in MEASUREMENTS if measurement.name in wanted)


def check_folder(folder: Path) -> None:
    """Refuses a report's folder that cannot be made or written; makes nothing that was not there.

    Heard before a model is loaded.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    probe = there / f".h2okv-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    try:
        # Whether a folder can be written is only told by writing: access() knows no read-only
        # file systems, and nothing can be made in /proc.
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ValueError(
            f"--out '{folder}' cannot be written ({error.strerror}); choose another folder for the"
            " report"
        ) from error


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
    except OSError as error:
        raise ValueError(
            f"'{folder}' cannot be written ({error.strerror}); choose another folder for the "
            "report."
        ) from error
    if not path.is_file():
        write_json(path, settings)
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
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{path}' cannot be read ({type(error).__name__}); choose another folder for the "
            "report, or delete this one."
        ) from error


def is_finished(folder: Path, measurement: Measurement) -> bool:
    """Tells whether all tables of a measurement are there."""
    return all((folder / f"{table}.csv").is_file() for table in measurement.tables)


def analyze(
    model: PreTrainedModel,
    sample: Sample,
    folder: Path,
    measurements: Sequence[Measurement],
    on_progress: OnProgress = lambda measurement, fraction: None,
) -> None:
    """Runs every measurement whose tables are not in the folder yet, and writes them there.

    After an interruption the same call goes on: finished tables stay, and so do the runs over the
    text that several measurements share.
    """
    study = Study(model, sample, folder / _KEPT_FOLDER)
    for measurement in measurements:
        if not is_finished(folder, measurement):
            on_progress(measurement, 0.0)
            for name, rows in measurement.run(study, partial(on_progress, measurement)).items():
                write_csv(folder / f"{name}.csv", rows)
        on_progress(measurement, 1.0)
