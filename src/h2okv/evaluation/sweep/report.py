"""A sweep's results as a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2okv.evaluation.result_table import markdown
from h2okv.evaluation.sweep.experiment import Experiment
from h2okv.evaluation.sweep.pivot import Line, budgets_of, published_lines


def report(experiment: Experiment, lines: Sequence[Line], row: Mapping[str, Any]) -> str:
    """Writes the page.

    Args:
        experiment: What was run.
        lines: The results.
        row: Any of the results' rows, for what all have in common.

    Returns:
        Markdown.
    """
    parts = [f"# {experiment.title}\n"]
    if experiment.source:
        parts.append(f"{experiment.source}\n")
    if experiment.remark:
        parts.append(f"{experiment.remark}\n")
    versions = f"h2okv {row['h2okv']} ({row['commit'] or 'no checkout'}), torch {row['torch']}"
    parts.append(
        f"Model {row['model']} ({row['revision']}, {row['dtype']}); {versions}, transformers"
        f" {row['transformers']}; seeds {', '.join(map(str, experiment.seeds))}.\n"
    )
    parts += [
        f"Left out, for this version does not have it: {s.label}.\n" for s in experiment.left_out
    ]
    parts.append(results_table(lines))
    for model, published in published_lines(experiment.published).items():
        parts.append(f"As published, {model}:\n")
        parts.append(_table(published, ["task", "policy"], lambda line: [line.task, line.policy]))
    return "\n".join(parts)


def results_table(lines: Sequence[Line]) -> str:
    """Sets results side by side: a line for each task and policy, a column for each budget.

    Args:
        lines: The results.

    Returns:
        A Markdown table.
    """
    return _table(
        lines,
        ["task", "samples", "metric", "policy"],
        lambda line: [line.task, line.samples, line.metric, line.policy],
    )


def _table(lines: Sequence[Line], names: Sequence[str], cells: Any) -> str:
    budgets = budgets_of(lines)
    return markdown(
        [*names, *budgets],
        [[*cells(line), *(line.values.get(budget) for budget in budgets)] for line in lines],
    )
