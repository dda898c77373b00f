"""Pictures of streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2okv.evaluation.streaming import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which stay apart for colour-blind readers; the line styles help in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_GREY = "#555555"
# Above that a number says nothing but "collapsed", and a float may not hold it.
_LARGEST_NLL = 60.0


def check_plot(path: Path) -> None:
    """Finds out before a long run whether its picture can be made."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"'{path}' is not a picture's name; let it end in {', '.join(SUFFIXES)}")
    _figure_class()


def plot_stream(path: Path, rows: Sequence[Row], window: int | None, title: str) -> None:
    """Draws one stream: perplexity above, time of a step and memory below."""
    if not rows:
        raise ValueError("there are no rows to draw; read more tokens, or give a smaller --every")
    figure = _figure_class()(figsize=(8, 8), layout="constrained")
    quality, speed, memory = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    figure.suptitle(title)
    draw_perplexity(quality, {"": rows}, window)
    positions = [row.position for row in rows]
    marker = "o" if len(rows) == 1 else ""
    speed.plot(positions, [1e3 * row.step_seconds for row in rows], _COLOURS[0], marker=marker)
    speed.set_ylabel("block, ms")
    speed.set_ylim(bottom=0)
    for column, name, number in (("rss_bytes", "process", 0), ("cache_bytes", "cache", 1)):
        sizes = [getattr(row, column) for row in rows]
        if None not in sizes:
            megabytes = [size / 2**20 for size in sizes]
            memory.plot(positions, megabytes, label=name, marker=marker, **line_look(number))
    # The cache is a small part of the process; on one plain scale it would lie on the axis.
    memory.set_yscale("log")
    _plain_numbers(memory.yaxis, between_decades=False)
    memory.set_ylabel("memory, MiB")
    memory.legend(loc="best")
    memory.set_xlabel("position in the stream, tokens")
    for axes in (speed, memory):
        axes.grid(alpha=0.3)
    _thousands(memory.xaxis)
    save_figure(figure, path)


def draw_perplexity(axes: Axes, curves: Mapping[str, Sequence[Row]], window: int | None) -> None:
    """Draws perplexity by position on a logarithmic scale; mutates the axes."""
    for number, (name, rows) in enumerate(curves.items()):
        axes.plot(
            [row.position for row in rows],
            [math.exp(min(row.nll, _LARGEST_NLL)) for row in rows],
            **line_look(number),
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


def line_look(number: int) -> dict[str, Any]:
    """Gives a line of a picture its colour and its style."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _STYLES[number % len(_STYLES)],
    }


def save_figure(figure: Any, path: Path) -> None:
    """Writes a picture."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(
            f"'{path}' cannot be written ({error.strerror}); choose another place"
        ) from error


def new_figure(width: float, height: float) -> Any:
    """Makes an empty picture."""
    return _figure_class()(figsize=(width, height), layout="constrained")


def _thousands(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _plain_numbers(axis: Any, between_decades: bool) -> None:
    """Writes 60 at a logarithmic axis where matplotlib would write 6 x 10^1."""
    from matplotlib.ticker import LogFormatter, NullFormatter

    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    within = LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5))
    axis.set_minor_formatter(within if between_decades else NullFormatter())


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "a picture needs matplotlib, which is not installed; pip install 'h2okv[plot]'"
        ) from error
    return Figure
