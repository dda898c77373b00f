"""Results by task and policy down, by budget across."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from h2okv.evaluation.evaluation import Cell
from h2okv.evaluation.sweep.experiment import Published

FULL = "full"


@dataclass
class Line:
    """One policy on one task.

    Attributes:
        task: The task's label.
        metric: What is counted.
        policy: The policy's label.
        values: By budget; the mean over seeds.
        stderrs: By budget; of one seed, where it is known.
        samples: How many samples or documents each value is made of.
    """

    task: str
    metric: str
    policy: str
    values: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float] = field(default_factory=dict)
    samples: int = 0


def pivot(cells: Sequence[Cell], rows: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Puts results in lines.

    Args:
        cells: What was run.
        rows: Of `Evaluation.rows`, by the cell's label; some may be missing.

    Returns:
        The lines in the cells' order, for each task the full cache first.
    """
    lines: dict[tuple[str, str], Line] = {}
    found: dict[tuple[str, str, str], list[float]] = {}
    for cell in cells:
        row = rows.get(cell.label)
        if row is None:
            continue
        task, policy = cell.task.label, cell.setting.policy_label
        line = lines.setdefault((task, policy), Line(task, row["metric"], policy))
        budget = cell.setting.budget_label
        values = found.setdefault((task, policy, budget), [])
        values.append(row["value"])
        line.values[budget] = statistics.fmean(values)
        line.samples = row["samples"]
        if row["stderr"] is not None:
            line.stderrs[budget] = row["stderr"]
    tasks = list(dict.fromkeys(line.task for line in lines.values()))
    return sorted(lines.values(), key=lambda line: (tasks.index(line.task), line.policy != FULL))


def published_lines(published: Sequence[Published]) -> dict[str, list[Line]]:
    """Puts published figures in lines, by model."""
    models: dict[str, dict[tuple[str, str], Line]] = {}
    for one in published:
        task = one.task if one.shots is None else f"{one.task}, shots {one.shots}"
        lines = models.setdefault(one.model, {})
        line = lines.setdefault((task, one.policy), Line(task, "", one.policy))
        line.values[one.budget] = one.value
    return {model: list(lines.values()) for model, lines in models.items()}


def budgets_of(lines: Sequence[Line]) -> list[str]:
    """Lists the budgets of lines: tokens, then fractions, the smallest first, and the full one."""
    return sorted({budget for line in lines for budget in line.values}, key=_size)


def _size(budget: str) -> tuple[int, float]:
    if budget == FULL:
        return 2, 0.0
    return int(budget.endswith("%")), float(budget.removesuffix("%"))
