"""What all commands of `h2okv eval` do: load a model, run, keep what there is, tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2okv.cli.bench_progress import BenchProgress
from h2okv.cli.exit_codes import INTERRUPTED
from h2okv.cli.options import parse_device, parse_dtype
from h2okv.cli.output import write_remark, write_text
from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.evaluation import Cell, Evaluation
from h2okv.evaluation.result_file import ResultFile
from h2okv.evaluation.result_table import markdown, write_csv
from h2okv.evaluation.subject import Subject
from h2okv.evaluation.task import Task
from h2okv.integration.loading import describe, load_weights
from h2okv.provenance import versions

_SUFFIX = ".samples.jsonl"


def load_subject(
    model: str, dtype: str, device: str, settings: Sequence[CacheSetting], seed: int
) -> Subject:
    """Loads a model to evaluate; a bad budget is heard about before its weights load.

    Args:
        model: A folder, a Hub id, or the bundled model.
        dtype: As the user wrote it.
        device: As the user wrote it.
        settings: The caches that it will be run with.
        seed: For policies that draw at random.

    Returns:
        The model.

    Raises:
        ValueError: If an option makes no sense, or the model cannot be loaded.
    """
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    described = describe(model)
    for setting in settings:
        setting.make(described.config, seed)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    return Subject(loaded, described.tokenizer, described.name, described.context)


def check_csv(path: Path) -> None:
    """Refuses a table's place before anything is computed.

    Raises:
        ValueError: If it is a folder or in no folder.
    """
    if path.is_dir():
        raise ValueError(f"--csv '{path}' is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--csv '{path}' is in no folder that exists; make it first")


def run_tasks(
    subject: Subject,
    tasks: Sequence[Task],
    settings: Sequence[CacheSetting],
    seed: int,
    csv: Path,
    detailed: bool = False,
) -> tuple[int, list[dict[str, Any]]]:
    """Runs tasks with several caches, writes the table, and prints the scores.

    Args:
        subject: The model.
        tasks: What to run; with the same metrics.
        settings: The caches.
        seed: Where random numbers start.
        csv: The table; each sample's result goes beside it as it comes.
        detailed: Whether the table has the task's own rows instead of one for each cache.

    Returns:
        The exit code, and the tasks' own rows of all caches that are done.
    """
    with ResultFile(csv.with_suffix(_SUFFIX), versions()) as file:
        cells = [Cell(task, setting, seed) for task in tasks for setting in settings]
        evaluation = Evaluation(subject, cells, file)
        code = run_cells(evaluation)
    rows, details = list(evaluation.rows().values()), evaluation.details()
    if rows:
        write_csv(csv, details if detailed else rows)
        header = [*tasks[0].columns, "policy", "budget", *tasks[0].metrics, "samples"]
        write_text(markdown(header, [[row[name] for name in header] for row in rows]))
    return code, details


def run_cells(evaluation: Evaluation) -> int:
    """Runs what is left to do under a progress bar; Ctrl-C ends it and loses nothing.

    Args:
        evaluation: What to run.

    Returns:
        The exit code.
    """
    if evaluation.done:
        write_remark(f"{evaluation.done} of {evaluation.total} samples were done before")
    with BenchProgress(evaluation.total) as progress:
        progress.done("", evaluation.done)
        try:
            evaluation.run(lambda cell, count: progress.done(cell.label, count))
        except KeyboardInterrupt:
            write_remark(
                f"stopped; {evaluation.done} of {evaluation.total} samples are in"
                f" '{evaluation.file.path}', and the same command goes on from there"
            )
            return INTERRUPTED
    return 0
