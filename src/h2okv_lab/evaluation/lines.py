"""Results of a sweep as lines, and their table: a policy on a task, by budget."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from h2okv.records import markdown_table
from h2okv_lab.evaluation.runner import Run

FULL = "full"


@dataclass
class Line:
    """One policy on one task: each seed's value by budget, and a seed's standard error."""

    task: str
    metric: str
    policy: str
    by_budget: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stderrs: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    @property
    def values(self) -> dict[str, float]:
        return {budget: statistics.fmean(values) for budget, values in self.by_budget.items()}


def pivot(runs: Sequence[Run], rows: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Arrange the available results as lines."""
    lines: dict[tuple[str, str], Line] = {}
    for run, row in ((run, rows[run.label]) for run in runs if run.label in rows):
        key = run.task.label, run.config.policy_label
        line = lines.setdefault(key, Line(key[0], row["metric"], key[1]))
        line.by_budget[run.config.budget_label].append(row["value"])
        line.samples = row["samples"]
        if row["stderr"] is not None:
            line.stderrs[run.config.budget_label] = row["stderr"]
    tasks = [line.task for line in lines.values()]
    return sorted(lines.values(), key=lambda line: (tasks.index(line.task), line.policy != FULL))


def sorted_budgets(lines: Sequence[Line]) -> list[str]:
    """Return the budgets of lines: tokens, then fractions, the smallest first, then full."""

    def size(budget: str) -> tuple[int, float]:
        if budget == FULL:
            return 2, 0.0
        return int(budget.endswith("%")), float(budget.removesuffix("%"))

    return sorted({budget for line in lines for budget in line.values}, key=size)


def results_table(
    lines: Sequence[Line], names: Sequence[str] = ("task", "samples", "metric", "policy")
) -> str:
    """Render results as a table: a row per task and policy, a column per budget."""
    budgets = sorted_budgets(lines)
    rows = [
        [*(getattr(line, name) for name in names), *map(line.values.get, budgets)] for line in lines
    ]
    return markdown_table([*names, *budgets], rows)
