"""Samples as medians with quartiles, rows of results, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy

from h2okv.console import format_number, format_table
from h2okv_lab.tables import Row

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
