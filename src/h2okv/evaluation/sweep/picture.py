"""The picture of a sweep: score against budget, one panel for each task (H2O, Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2okv.evaluation.stream_plot import line_look, new_figure, save_figure
from h2okv.evaluation.sweep.pivot import FULL, Line, budgets_of

_COLUMNS = 3
_PANEL = (4.0, 3.0)
_MARKERS = "osD^vPX*"


def plot_sweep(path: Path, lines: Sequence[Line], title: str) -> None:
    """Draws scores against budgets, with the full cache as a dashed line.

    Args:
        path: The picture's file; its suffix says which kind.
        lines: The results; at least one.
        title: What stands above.

    Raises:
        ValueError: If the picture cannot be made.
    """
    tasks = list(dict.fromkeys(line.task for line in lines))
    policies = list(dict.fromkeys(line.policy for line in lines if set(line.values) - {FULL}))
    columns = min(_COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    figure = new_figure(max(_PANEL[0] * columns, 6), _PANEL[1] * rows + 1.2)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, task in zip(panels, tasks, strict=False):
        _draw(axes, [line for line in lines if line.task == task], policies)
        axes.set_title(task, fontsize="medium")
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in panels[: len(tasks)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    save_figure(figure, path)


def _draw(axes: Any, lines: Sequence[Line], policies: Sequence[str]) -> None:
    """Draws one task; mutates the axes."""
    budgets = [budget for budget in budgets_of(lines) if budget != FULL]
    place = {budget: number for number, budget in enumerate(budgets)}
    for line in lines:
        known = [budget for budget in budgets if budget in line.values]
        if not known:
            _draw_full(axes, line)
            continue
        number = policies.index(line.policy)
        axes.errorbar(
            [place[budget] for budget in known],
            [line.values[budget] for budget in known],
            yerr=[line.stderrs.get(budget, 0.0) for budget in known],
            marker=_MARKERS[number % len(_MARKERS)],
            capsize=2,
            label=line.policy,
            **line_look(number),
        )
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlabel("budget")
    axes.set_ylabel(lines[0].metric)
    axes.grid(alpha=0.3)


def _draw_full(axes: Any, line: Line) -> None:
    style = "--" if line.policy == FULL else ":"
    axes.axhline(line.values[FULL], color="#555555", linestyle=style, label=line.policy)
