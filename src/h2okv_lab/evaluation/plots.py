"""Plots of streams, sweeps and needles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from h2okv_lab.evaluation.streaming import StreamRow
from h2okv_lab.evaluation.task import FULL, Line, sorted_budgets
from h2okv_lab.tables import COLOURS, MARKERS, new_figure, save_figure

_STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_GREY = "#555555"
# Larger ones all mean "collapsed", and their perplexity may overflow a float.
_LARGEST_NLL = 60.0
_PANEL_COLUMNS = 3
# Smaller ones are rounding errors, and a logarithmic axis cannot show zero.
_MIN_KL = 1e-6
_DARK = 0.6


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": _STYLES[number % len(_STYLES)]}


def plot_stream(path: Path, rows: Sequence[StreamRow], window: int | None, title: str) -> None:
    """Plot one stream: perplexity, time of a step and memory."""
    if not rows:
        raise ValueError("there are no rows to plot; read more tokens, or give a smaller --every")
    figure = new_figure(8, 8)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    quality, speed, memory = panels
    figure.suptitle(title)
    positions, nlls, seconds, resident, cached = zip(*rows, strict=True)
    marker = "o" if len(rows) == 1 else ""
    perplexities = [math.exp(min(nll, _LARGEST_NLL)) for nll in nlls]
    quality.plot(positions, perplexities, marker=marker, **_look(0))
    if window is not None:
        quality.axvline(window, color=_GREY, linewidth=1, linestyle=":")
        transform: Any = quality.get_xaxis_transform()
        note = f" context window, {window:,}"
        quality.text(
            window, 0.98, note, transform=transform, va="top", color=_GREY, fontsize="small"
        )
    speed.plot(positions, [1e3 * duration for duration in seconds], COLOURS[0], marker=marker)
    speed.set_ylim(bottom=0)
    for number, (name, sizes) in enumerate((("process", resident), ("cache", cached))):
        if None not in sizes:
            megabytes = [size / 2**20 for size in sizes]
            memory.plot(positions, megabytes, label=name, marker=marker, **_look(number))
    memory.legend(loc="best")
    # The cache is a small part of the process; on a linear scale it would lie on the axis.
    for axes in (quality, memory):
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis, between_decades=axes is quality)
    for axes, axis_label in zip(panels, ("perplexity", "block, ms", "memory, MiB"), strict=True):
        axes.set_ylabel(axis_label)
        axes.grid(alpha=0.3, which="both")
    memory.set_xlabel("position in the stream, tokens")
    memory.xaxis.set_major_formatter("{x:,.0f}")
    save_figure(figure, path)


def _plain_numbers(axis: Any, between_decades: bool) -> None:
    """Label a logarithmic axis with 60 where matplotlib would write 6 x 10^1."""
    from matplotlib.ticker import LogFormatter, NullFormatter

    axis.set_major_formatter("{x:,g}")
    within = LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5))
    axis.set_minor_formatter(within if between_decades else NullFormatter())


def plot_sweep(path: Path, lines: Sequence[Line], title: str) -> None:
    """Plot scores against budgets, with the full cache as a dashed line."""
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
        handles |= {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    save_figure(figure, path)


def _draw_task(axes: Any, lines: Sequence[Line], policies: Sequence[str]) -> None:
    budgets = [budget for budget in sorted_budgets(lines) if budget != FULL]
    for line in lines:
        points = [(x, budget) for x, budget in enumerate(budgets) if budget in line.values]
        if not points:
            style = "--" if line.policy == FULL else ":"
            axes.axhline(line.values[FULL], color=_GREY, linestyle=style, label=line.policy)
            continue
        number = policies.index(line.policy)
        look = {**_look(number), "marker": MARKERS[number % len(MARKERS)], "capsize": 2}
        values = [line.values[budget] for _, budget in points]
        bars = [line.stderrs.get(budget, 0.0) for _, budget in points]
        axes.errorbar([x for x, _ in points], values, bars, label=line.policy, **look)
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set(xlabel="budget", ylabel=lines[0].metric)
    axes.grid(alpha=0.3)


def plot_needles(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plot the fraction of needles found: one row of panels per compression."""
    panels: dict[tuple[str, str], dict[tuple[int, float], float]] = {}
    for row in rows:
        panel = panels.setdefault((row["compression"], row["cache"]), {})
        panel[row["length"], row["depth"]] = row["string_match"]
    kinds, caches = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
    figure = new_figure(max(3.2 * len(caches), 5), 3.2 * len(kinds) + 0.8)
    figure.suptitle(title)
    grid = figure.subplots(len(kinds), len(caches), sharex=True, sharey=True, squeeze=False)
    for (kind, cache), cells in panels.items():
        axes = grid[kinds.index(kind), caches.index(cache)]
        image = _draw_needles(axes, cells)
        axes.set_title(f"{cache}\n{kind}", fontsize="medium")
    figure.supxlabel("length, tokens")
    figure.supylabel("depth of the needle, %")
    figure.colorbar(image, ax=grid.flatten().tolist(), label="fraction found")
    save_figure(figure, path)


def _draw_needles(axes: Any, cells: Mapping[tuple[int, float], float]) -> Any:
    lengths, depths = (sorted(set(values)) for values in zip(*cells, strict=True))
    grid = [[cells[length, depth] for length in lengths] for depth in depths]
    image = axes.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}" for depth in depths])
    for (length, depth), value in cells.items():
        look = {"color": "black" if value > _DARK else "white", "fontsize": 8}
        x, y = lengths.index(length), depths.index(depth)
        axes.text(x, y, f"{value:.2g}", ha="center", va="center", **look)
    return image


def plot_fidelity(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plot the divergence from the full cache against bytes, and the Pareto front."""
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: (row["bytes_fraction"], row["kl"]))
    points = [(100 * row["bytes_fraction"], max(row["kl"], _MIN_KL)) for row in ordered]
    best = [point for n, point in enumerate(points) if all(point[1] < p[1] for p in points[:n])]
    axes.plot(*zip(*best, strict=True), color=_GREY, linewidth=5, alpha=0.3, label="Pareto")
    for number, name in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        indices = [n for n, row in enumerate(ordered) if row["cache"] == name]
        fractions, kls = zip(*(points[n] for n in indices), strict=True)
        ends = [[ordered[n][end] for n in indices] for end in ("kl_low", "kl_high")]
        bars = None
        if None not in ends[0]:
            bars = [[abs(kl - e) for kl, e in zip(kls, end, strict=True)] for end in ends]
        look = {**_look(number), "marker": MARKERS[number % len(MARKERS)], "capsize": 2}
        axes.errorbar(fractions, kls, bars, label=name, **look)
    axes.set(
        title=title, xscale="log", yscale="log", xlabel="bytes of the cache, % of the full cache"
    )
    axes.set_ylabel("KL divergence from the full cache, nats a token")
    _plain_numbers(axes.xaxis, between_decades=True)
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper")  # covers no point
    save_figure(figure, path)
