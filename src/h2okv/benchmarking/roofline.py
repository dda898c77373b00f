"""The picture: measured decode steps beside the time that reading the bytes alone would take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2okv.benchmarking.caches import cache_label
from h2okv.benchmarking.comparison import Row

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which stay apart for colour-blind readers; the markers help in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def check_plot(path: Path) -> None:
    """Finds out before a long run whether its picture can be made."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"--plot '{path}' is not a picture's name; let it end in {', '.join(SUFFIXES)}"
        )
    _figure_class()


def plot_roofline(path: Path, rows: Sequence[Row]) -> None:
    """Draws the time of a decode step by context, a panel for each dtype and batch.

    Points are medians with quartiles. The dashed line of the same colour is the limit: the bytes
    that the step must read over the bandwidth measured in the run.
    """
    timed = [row for row in rows if row.decode is not None]
    if not timed:
        raise ValueError("no decode step was measured, so there is nothing to draw")
    panels = list(dict.fromkeys((row.dtype, row.batch) for row in timed))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure_class()(figsize=(5 * columns + 1, 4 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    labels = list(dict.fromkeys(_label(row) for row in timed))
    for axes, panel in zip(grid.flat, panels, strict=False):
        own = [row for row in timed if (row.dtype, row.batch) == panel]
        for number, label in enumerate(labels):
            _draw(axes, [row for row in own if _label(row) == label], label, number)
        axes.set_title(f"{panel[0]}, batch {panel[1]}")
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("decode step, ms (dashed: limit)")
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({row.context for row in own}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].legend(loc="best", fontsize="small")
    title = f"{timed[0].model}, {timed[0].positions} positions"
    figure.suptitle(title, fontsize="small", wrap=True)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(
            f"--plot '{path}' cannot be written ({error.strerror}); choose another place"
        ) from error


def _draw(axes: Any, rows: list[Row], label: str, number: int) -> None:
    """Draws one cache's points and its limit; mutates the axes."""
    points = [(row.context, row.decode, row.step_bytes, row.bandwidth) for row in rows]
    points.sort(key=lambda point: point[0])
    colour = _COLOURS[number % len(_COLOURS)]
    contexts = [context for context, *_ in points]
    spreads = [spread for _, spread, *_ in points if spread is not None]
    below = [1e3 * (spread.median - spread.lower) for spread in spreads]
    above = [1e3 * (spread.upper - spread.median) for spread in spreads]
    axes.errorbar(
        contexts, [1e3 * spread.median for spread in spreads], yerr=(below, above), label=label,
        color=colour, marker=_MARKERS[number % len(_MARKERS)], capsize=3, linewidth=1,
    )  # fmt: skip
    limits = [(context, 1e3 * size / rate) for context, _, size, rate in points if size and rate]
    # A single context has no line; a short dash shows its limit.
    marker = "_" if len(limits) == 1 else ""
    axes.plot(
        [context for context, _ in limits], [limit for _, limit in limits],
        color=colour, linestyle="--", marker=marker, markersize=14, linewidth=1,
    )  # fmt: skip


def _label(row: Row) -> str:
    return cache_label(row.cache, row.budget, row.kv_bits)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, which is not installed; pip install 'h2okv[plot]'"
        ) from error
    return Figure
