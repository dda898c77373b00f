"""`h2okv eval sweep`: policies by budgets by tasks, from one file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from h2okv.cli.bench_options import split_list
from h2okv.cli.eval_options import Device, Dtype, Limit, Model, PrefillChunk
from h2okv.cli.eval_run import load_subject, run_cells
from h2okv.cli.options import parse_positions
from h2okv.cli.output import write_remark, write_text
from h2okv.evaluation.evaluation import Cell, Evaluation
from h2okv.evaluation.result_file import ResultFile
from h2okv.evaluation.result_table import write_csv
from h2okv.evaluation.sweep.experiment import Experiment, experiment_names, load_experiment
from h2okv.evaluation.sweep.making_tasks import Surroundings, make_tasks
from h2okv.evaluation.sweep.picture import plot_sweep
from h2okv.evaluation.sweep.pivot import pivot
from h2okv.evaluation.sweep.report import report, results_table
from h2okv.evaluation.task import Task
from h2okv.evaluation.unknown_name import unknown
from h2okv.integration.loading import BUNDLED
from h2okv.provenance import versions

SAMPLES_FILE = "samples.jsonl"
_WORK_FOLDER = "working"

HELP = f"""Run policies, budgets and tasks as one file says, and set the scores side by side.

The folder gets results.csv (a row for each policy, budget, task and seed), results.md,
results.png, and samples.jsonl, where every result stands as it comes: after Ctrl-C the same
command goes on.

Experiments that come along: {", ".join(experiment_names())}.

Examples:

    h2okv eval sweep figure4 --data DIR --out figure4 --limit 100

    h2okv eval sweep my_experiment.yaml --model ./my-model --data DIR --out results
"""


def sweep(
    experiment: Annotated[
        str, typer.Argument(help="One that comes along, or a YAML file.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder that the results go to.")],
    data: Annotated[
        Path | None, typer.Option(help="The folder with the tasks' data files.")
    ] = None,
    model: Model = BUNDLED,
    only: Annotated[
        str | None, typer.Option(help="Run these tasks only, by name, with commas.")
    ] = None,
    limit: Limit = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts at a time.", show_default="the experiment's")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(help="original, rolling or clamped.", show_default="the experiment's"),
    ] = None,
    prefill_chunk: PrefillChunk = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Runs an experiment, as `HELP` tells the user."""
    if data is not None and not data.is_dir():
        raise ValueError(f"--data '{data}' is no folder; name the one with the data files")
    placed = None if positions is None else parse_positions(positions)
    plan = load_experiment(experiment).placed(placed, prefill_chunk)
    work = out / _WORK_FOLDER
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out '{out}' cannot be made ({error.strerror}); choose another folder"
        ) from error
    tasks = _chosen(make_tasks(plan, Surroundings(data, work, limit, batch_size)), only)
    for setting in plan.left_out:
        write_remark(f"left out, for this version of h2okv does not have it: {setting.label}")
    cells = [
        Cell(task, setting, seed)
        for task in tasks
        for setting in plan.settings
        for seed in plan.seeds
    ]
    subject = load_subject(model, dtype, device, plan.settings, plan.seeds[0])
    with ResultFile(out / SAMPLES_FILE, versions()) as file:
        evaluation = Evaluation(subject, cells, file)
        code = run_cells(evaluation)
        _write(plan, evaluation, out)
    return code


def _chosen(tasks: list[Task], only: str | None) -> list[Task]:
    if only is None:
        return tasks
    names = [task.name for task in tasks]
    for name in split_list(only):
        if name not in names:
            raise unknown("--only: task", name, dict.fromkeys(names))
    return [task for task in tasks if task.name in split_list(only)]


def _write(plan: Experiment, evaluation: Evaluation, out: Path) -> None:
    """Writes tables and picture of the cells that are done, and prints the table."""
    rows = evaluation.rows()
    if not rows:
        return
    lines = pivot(evaluation.cells, rows)
    write_csv(out / "results.csv", list(rows.values()))
    page = report(plan, lines, next(iter(rows.values())))
    (out / "results.md").write_text(page, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        plot_sweep(out / "results.png", lines, plan.title)
    else:
        write_remark("no picture without matplotlib; pip install 'h2okv[plot]'")
    write_text(results_table(lines))
