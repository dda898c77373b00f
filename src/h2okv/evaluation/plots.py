"""Pictures of streams, sweeps and needles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2okv.evaluation.streaming import StreamRow
from h2okv.plots import COLOURS, MARKERS, new_figure, save_figure

if TYPE_CHECKING:
    from h2okv.evaluation.sweep import Line

_STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_GREY = "#555555"
# Above that a number says nothing but "collapsed", and a float may not hold it.
_LARGEST_NLL = 60.0
_PANEL_COLUMNS = 3
# Below that it is rounding, and a logarithmic axis has no place for zero.
_LEAST_KL = 1e-6
_DARK = 0.6
FULL = "full"


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": _STYLES[number % len(_STYLES)]}


def plot_stream(path: Path, rows: Sequence[StreamRow], window: int | None, title: str) -> None:
    """Draws one stream: perplexity above, time of a step and memory below."""
    if not rows:
        raise ValueError("there are no rows to draw; read more tokens, or give a smaller --every")
    figure = new_figure(8, 8)
    quality, speed, memory = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    figure.suptitle(title)
    draw_perplexity(quality, {"": rows}, window)
    positions = [row.position for row in rows]
    marker = "o" if len(rows) == 1 else ""
    speed.plot(positions, [1e3 * row.step_seconds for row in rows], COLOURS[0], marker=marker)
    speed.set_ylabel("block, ms")
    speed.set_ylim(bottom=0)
    for number, (name, column) in enumerate((("process", "rss_bytes"), ("cache", "cache_bytes"))):
        sizes = [getattr(row, column) for row in rows]
        if None not in sizes:
            megabytes = [size / 2**20 for size in sizes]
            memory.plot(positions, megabytes, label=name, marker=marker, **_look(number))
    # The cache is a small part of the process; on one plain scale it would lie on the axis.
    memory.set_yscale("log")
    _plain_numbers(memory.yaxis, between_decades=False)
    memory.set_ylabel("memory, MiB")
    memory.legend(loc="best")
    memory.set_xlabel("position in the stream, tokens")
    memory.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (speed, memory):
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def draw_perplexity(
    axes: Any, curves: Mapping[str, Sequence[StreamRow]], window: int | None
) -> None:
    """Draws perplexity by position on a logarithmic scale; mutates the axes."""
    for number, (name, rows) in enumerate(curves.items()):
        axes.plot(
            [row.position for row in rows],
            [math.exp(min(row.nll, _LARGEST_NLL)) for row in rows],
            **_look(number),
            marker="o" if len(rows) == 1 else "",
            label=name or None,
        )
    if window is not None:
        axes.axvline(window, color=_GREY, linewidth=1, linestyle=":")
        axes.annotate(
            f"context window, {window:,}",
            (window, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -4),
            textcoords="offset points",
            va="top",
            color=_GREY,
            fontsize="small",
        )
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis, between_decades=True)
    axes.set_ylabel("perplexity")
    axes.grid(alpha=0.3, which="both")
    if any(curves):
        axes.legend(loc="best")


def _plain_numbers(axis: Any, between_decades: bool) -> None:
    """Writes 60 at a logarithmic axis where matplotlib would write 6 x 10^1."""
    from matplotlib.ticker import LogFormatter, NullFormatter

    axis.set_major_formatter("{x:,g}")
    within = LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5))
    axis.set_minor_formatter(within if between_decades else NullFormatter())


def plot_sweep(path: Path, lines: Sequence[Line], title: str) -> None:
    """Draws scores against budgets, with the full cache as a dashed line."""
    tasks = list(dict.fromkeys(line.task for line in lines))
    policies = list(dict.fromkeys(line.policy for line in lines if set(line.values) - {FULL}))
    columns = min(_PANEL_COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    figure = new_figure(max(4 * columns, 6), 3 * rows + 1.2)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    handles: dict[str, Any] = {}
    for axes, task in zip(panels, tasks, strict=False):
        _draw_task(axes, [line for line in lines if line.task == task], policies)
        axes.set_title(task, fontsize="medium")
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    save_figure(figure, path)


def _draw_task(axes: Any, lines: Sequence[Line], policies: Sequence[str]) -> None:
    budgets = [budget for budget in sorted_budgets(lines) if budget != FULL]
    for line in lines:
        known = [budget for budget in budgets if budget in line.values]
        if not known:
            style = "--" if line.policy == FULL else ":"
            axes.axhline(line.values[FULL], color=_GREY, linestyle=style, label=line.policy)
            continue
        number = policies.index(line.policy)
        axes.errorbar(
            [budgets.index(budget) for budget in known],
            [line.values[budget] for budget in known],
            yerr=[line.stderrs.get(budget, 0.0) for budget in known],
            marker=MARKERS[number % len(MARKERS)],
            capsize=2,
            label=line.policy,
            **_look(number),
        )
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlabel("budget")
    axes.set_ylabel(lines[0].metric)
    axes.grid(alpha=0.3)


def sorted_budgets(lines: Sequence[Line]) -> list[str]:
    """The budgets of lines: tokens, then fractions, the smallest first, and the full one."""

    def size(budget: str) -> tuple[int, float]:
        if budget == FULL:
            return 2, 0.0
        return int(budget.endswith("%")), float(budget.removesuffix("%"))

    return sorted({budget for line in lines for budget in line.values}, key=size)


def plot_needles(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draws which fraction of the needles was found: a line for each way to compress."""
    panels: dict[tuple[str, str], dict[tuple[int, float], float]] = {}
    for row in rows:
        cache = FULL if row["policy"] == FULL else f"{row['policy']} {row['budget']}"
        panel = panels.setdefault((row["compression"], cache), {})
        panel[row["length"], row["depth"]] = row["string_match"]
    kinds, caches = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
    figure = new_figure(max(3.2 * len(caches), 5), 3.2 * len(kinds) + 0.8)
    figure.suptitle(title)
    grid = figure.subplots(len(kinds), len(caches), sharex=True, sharey=True, squeeze=False)
    for line, kind in zip(grid.tolist(), kinds, strict=True):
        for axes, cache in zip(line, caches, strict=True):
            image = _draw_needles(axes, panels[kind, cache])
            axes.set_title(f"{cache}\n{kind}", fontsize="medium")
    figure.supxlabel("length, tokens")
    figure.supylabel("depth of the needle, %")
    figure.colorbar(image, ax=grid.flatten().tolist(), label="fraction found")
    save_figure(figure, path)


def _draw_needles(axes: Any, cells: Mapping[tuple[int, float], float]) -> Any:
    """Draws one heat map, with the number in each of its cells."""
    lengths, depths = (sorted(set(places)) for places in zip(*cells, strict=True))
    values = [[cells[length, depth] for length in lengths] for depth in depths]
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}" for depth in depths])
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            colour = "black" if value > _DARK else "white"
            axes.text(x, y, f"{value:.2g}", ha="center", va="center", color=colour, fontsize=8)
    return image


def plot_fidelity(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draws the divergence from the full cache against bytes, and the line of the best caches."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    axes.set_title(title)
    ordered = sorted(rows, key=lambda row: (row["bytes_fraction"], row["kl"]))
    points = [(100 * row["bytes_fraction"], max(row["kl"], _LEAST_KL)) for row in ordered]
    best = [point for n, point in enumerate(points) if all(point[1] < p[1] for p in points[:n])]
    axes.plot(*zip(*best, strict=True), color=_GREY, linewidth=5, alpha=0.3, label="Pareto")
    for number, name in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        own = [n for n, row in enumerate(ordered) if row["cache"] == name]
        ends = [[ordered[n][end] for n in own] for end in ("kl_low", "kl_high")]
        kls = [points[n][1] for n in own]
        bars = None
        if None not in ends[0]:
            bars = [[abs(kl - e) for kl, e in zip(kls, end, strict=True)] for end in ends]
        axes.errorbar(
            [points[n][0] for n in own], kls, bars, marker=MARKERS[number % len(MARKERS)],
            capsize=2, label=name, **_look(number),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_numbers(axes.xaxis, between_decades=True)
    axes.set_xlabel("bytes held, % of the full cache")
    axes.set_ylabel("KL divergence from the full cache, nats a token")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="best")
    save_figure(figure, path)
