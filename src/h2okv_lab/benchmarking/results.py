"""Samples as medians with quartiles, rows of results, their tables and their plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy

from h2okv.console import format_number, format_table
from h2okv_lab.tables import COLOURS, MARKERS, Row, new_figure, save_figure

_T = TypeVar("_T")


def interleaved(items: Sequence[_T], rounds: int) -> Iterator[tuple[int, _T]]:
    """Yield all items in every round, in reverse order in every other one: none is favoured."""
    for number in range(rounds):
        for item in items if number % 2 == 0 else reversed(items):
            yield number, item


def quartiles(name: str, samples: Sequence[float]) -> dict[str, Any]:
    """Return the median of samples and its quartiles as three columns; none for no samples."""
    if not samples:
        return {}
    lower, median, upper = numpy.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return {name: median, f"{name}_lower": lower, f"{name}_upper": upper}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return ratios within rounds; both arguments are in order of the rounds."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def triple(name: str) -> tuple[str, str, str]:
    """Return the column names of a median with its quartiles."""
    return name, f"{name}_lower", f"{name}_upper"


Cell = Callable[[Row], str]
_NONE = "-"


def _number(column: str, factor: float = 1.0) -> Cell:
    return lambda row: _shown(row[column], factor)


def _spread(column: str) -> Cell:
    return lambda row: _several("{} [{}, {}]", *(_shown(row[name]) for name in triple(column)))


def _several(form: str, *texts: str) -> str:
    return _NONE if _NONE in texts else form.format(*texts)


def _shown(value: float | None, factor: float = 1.0) -> str:
    return _NONE if value is None else format_number(value * factor)


def _label(row: Row) -> str:
    return str(row["spec"])


_COMPARISON: dict[str, Cell] = {
    "cache": _label,
    "prefill\ns": _number("prefill"),
    "/ full": _number("prefill_ratio"),
    "step\nms": _number("decode", 1e3),
    "tokens\n/ s": _number("tokens_per_second"),
    "speed-up\n[quartiles]": _spread("speedup"),
    "limit": _number("limit"),
    "of it\n%": _number("share", 100),
    "cache\nMiB": _number("cache_bytes", 2**-20),
    "peak\nMiB": _number("peak_bytes", 2**-20),
}
_MAX_BATCH: dict[str, Cell] = {
    "cache": _label,
    "cache\nMiB": _number("cache_bytes", 2**-20),
    "forward\nMiB": _number("activation_bytes", 2**-20),
    "largest\nbatch": lambda row: f"{row['max_batch']:,}{'' if row['is_verified'] else ' ?'}",
    "run\nwith": _number("run_batch"),
    "peak\nGiB": _number("peak_bytes", 2**-30),
    "prefill\ns": _number("prefill"),
    "step\nms": _number("decode", 1e3),
    "tokens\n/ s": _number("tokens_per_second"),
    "/ full\n[quartiles]": _spread("throughput_ratio"),
}


def comparison_table(rows: Sequence[Row]) -> str:
    """Render the caches side by side, a table for each dtype, context and batch."""
    measured = [row for row in rows if row["status"] == "ok"]
    return _tables(_COMPARISON, measured, "{dtype}, context {context:,}, batch {batch}")


def missing_figures(rows: Sequence[Row]) -> list[str]:
    """Return the caches without figures and the reasons, each once."""
    missing = [row for row in rows if row["status"] != "ok"]
    return list(dict.fromkeys(f"{row['cache']}: {row['status']}" for row in missing))


def max_batch_table(rows: Sequence[Row]) -> str:
    """Render the largest batches side by side, a table for each dtype and context."""
    note = "" if all(row["is_verified"] for row in rows) else "? by arithmetic, not run\n"
    return _tables(_MAX_BATCH, rows, "{dtype}, context {context:,}") + note


def _tables(cells: Mapping[str, Cell], rows: Sequence[Row], title: str) -> str:
    groups = groupby(rows, lambda row: title.format(**row))
    return "\n".join(f"{name}\n{_table(cells, list(group))}" for name, group in groups)


def _table(cells: Mapping[str, Cell], rows: Sequence[Row]) -> str:
    """Render a table at most 100 columns wide, without columns that have no figure."""
    texts = {heading: [cell(row) for row in rows] for heading, cell in cells.items()}
    shown = {heading: column for heading, column in texts.items() if set(column) != {_NONE}}
    return format_table(list(shown), zip(*shown.values(), strict=True), ("cache",))


def plot_roofline(path: Path, rows: Sequence[Row]) -> None:
    """Plot steps by context and, dashed, the time of reading, per dtype and batch."""
    timed = [row for row in rows if row["decode"] is not None]
    panels = list(dict.fromkeys((row["dtype"], row["batch"]) for row in timed))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(5 * columns + 1, 4 * lines)
    grid = figure.subplots(lines, columns, squeeze=False)
    labels = list(dict.fromkeys(map(_label, timed)))
    for axes, panel in zip(grid.flat, panels, strict=False):
        shown = [row for row in timed if (row["dtype"], row["batch"]) == panel]
        for number, label in enumerate(labels):
            _draw(axes, [row for row in shown if _label(row) == label], label, number)
        axes.set(
            title=f"{panel[0]}, batch {panel[1]}", xlabel="context, tokens",
            ylabel="decode step, ms (dashed: limit)", xticks=sorted({r["context"] for r in shown}),
        )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].legend(loc="best", fontsize="small")
    title = f"{timed[0]['model']}, {timed[0]['positions']} positions"
    figure.suptitle(title, fontsize="small", wrap=True)
    save_figure(figure, path)


def _draw(axes: Any, rows: Sequence[Row], label: str, number: int) -> None:
    """Draw one cache's points and its limit; mutates the axes."""
    rows = sorted(rows, key=lambda row: row["context"])
    contexts = [row["context"] for row in rows]
    medians, lower, upper = (
        1e3 * numpy.array([row[name] for row in rows]) for name in triple("decode")
    )
    colour = COLOURS[number % len(COLOURS)]
    axes.errorbar(
        contexts, medians, yerr=(medians - lower, upper - medians), label=label, color=colour,
        marker=MARKERS[number % len(MARKERS)], capsize=3, linewidth=1,
    )  # fmt: skip
    # A single context has no line; a short dash shows its limit.
    axes.plot(
        contexts, [1e3 * row["step_bytes"] / row["bandwidth"] for row in rows], color=colour,
        linestyle="--", marker="_" if len(rows) == 1 else "", markersize=14, linewidth=1,
    )  # fmt: skip
