"""The tables that `h2okv bench` prints, at most 100 columns wide; files have every figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from h2okv.benchmarking.caches import cache_label
from h2okv.benchmarking.comparison import Row
from h2okv.benchmarking.max_batch import MaxBatchRow
from h2okv.benchmarking.serving import LoadResult
from h2okv.benchmarking.timing import Percentiles, Spread
from h2okv.console import format_table

_NONE = "-"
_LATE = 0.05
Cells = Mapping[str, Callable[[Any], str]]


def comparison_table(rows: Sequence[Row]) -> str:
    """The caches side by side, a table for each dtype, context and batch."""
    cells: Cells = {
        "cache": lambda r: cache_label(r.cache, r.budget, r.kv_bits),
        "prefill\ns": lambda r: _median(r.prefill),
        "/ full": lambda r: _median(r.prefill_ratio),
        "step\nms": lambda r: _median(r.decode, 1e3),
        "tokens\n/ s": lambda r: _number(r.tokens_per_second),
        "speed-up\n[quartiles]": lambda r: _spread(r.speedup),
        "limit": lambda r: _number(r.limit),
        "of it\n%": lambda r: _number(r.share, 100),
        "cache\nMiB": lambda r: _number(r.cache_bytes, 2**-20),
        "peak\nMiB": lambda r: _number(r.peak_bytes, 2**-20),
    }
    measured = [row for row in rows if row.status == "ok"]
    groups = groupby(measured, lambda r: f"{r.dtype}, context {r.context:,}, batch {r.batch}")
    return "\n".join(f"{title}\n{_table(cells, list(group))}" for title, group in groups)


def missing_figures(rows: Sequence[Row]) -> list[str]:
    """Says which caches gave no figure, and why, each once."""
    return list(dict.fromkeys(f"{row.cache}: {row.status}" for row in rows if row.status != "ok"))


def max_batch_table(rows: Sequence[MaxBatchRow]) -> str:
    """The largest batches side by side, a table for each dtype and context."""
    cells: Cells = {
        "cache": lambda r: cache_label(r.cache, r.budget, r.kv_bits),
        "cache\nMiB": lambda r: _number(r.cache_bytes, 2**-20),
        "forward\nMiB": lambda r: _number(r.activation_bytes, 2**-20),
        "largest\nbatch": lambda r: f"{r.max_batch:,}{'' if r.is_verified else ' ?'}",
        "run\nwith": lambda r: str(r.run_batch),
        "peak\nGiB": lambda r: _number(r.peak_bytes, 2**-30),
        "prefill\ns": lambda r: _median(r.prefill),
        "step\nms": lambda r: _median(r.decode, 1e3),
        "tokens\n/ s": lambda r: _number(r.tokens_per_second),
        "/ full\n[quartiles]": lambda r: _spread(r.throughput_ratio),
    }
    note = "" if all(row.is_verified for row in rows) else "? by arithmetic, not run\n"
    groups = groupby(rows, lambda r: f"{r.dtype}, context {r.context:,}")
    return "\n".join(f"{title}\n{_table(cells, list(group))}" for title, group in groups) + note


def serving_table(rows: Sequence[LoadResult]) -> str:
    """The loads side by side."""
    cells: Cells = {
        "server": lambda r: r.server.removeprefix("http://"),
        "load": lambda r: r.load.label,
        "done": lambda r: f"{r.summary.finished}/{r.summary.requests}",
        "tokens\nin + new": lambda r: (
            f"{_number(r.summary.prompt_tokens)} + {_number(r.summary.new_tokens)}"
        ),
        "new\ntokens/s": lambda r: _number(r.summary.new_tokens_per_second),
        "first token\ns, p50/95/99": lambda r: _points(r.summary.first_token, 1),
        "per token\nms, p50/95/99": lambda r: _points(r.summary.per_token, 1e3),
        "gap p99\nms": lambda r: _number(r.summary.gap and r.summary.gap.p99, 1e3),
    }
    return _table(cells, rows, ("server", "load"))


def serving_remarks(rows: Sequence[LoadResult]) -> list[str]:
    """Says what a reader of the table must know: errors, how tokens were counted, lateness."""
    lines: list[str] = []
    for row in rows:
        summary, where = row.summary, f"{row.server}, {row.load.label}"
        for kind, count in summary.errors.items():
            lines.append(f"{where}: {count} x {kind}: {row.messages[kind]}")
        if summary.interrupted:
            lines.append(
                f"{where}: stopped; {summary.interrupted} requests were running, which count"
                " nowhere"
            )
        if summary.counted_by in ("pieces", "both"):
            told = "not" if summary.counted_by == "pieces" else "not always"
            lines.append(
                f"{row.server}: the server does {told} tell token counts; pieces of the stream are"
                " counted instead"
            )
        if summary.lateness is not None and summary.lateness.p95 > _LATE:
            lines.append(
                f"{where}: requests were sent up to {summary.lateness.p95:.2f} s late (p95); this"
                " machine is too slow for the rate"
            )
    return list(dict.fromkeys(lines))


def _table(cells: Cells, rows: Sequence[Any], left: Sequence[str] = ("cache",)) -> str:
    """Renders a table; columns without any figure are left out."""
    texts = {heading: [cell(row) for row in rows] for heading, cell in cells.items()}
    shown = {heading: own for heading, own in texts.items() if set(own) != {_NONE}}
    return format_table(list(shown), zip(*shown.values(), strict=True), left)


def _median(value: Spread | None, factor: float = 1.0) -> str:
    return _NONE if value is None else _number(value.median, factor)


def _spread(value: Spread | None) -> str:
    if value is None:
        return _NONE
    return f"{_number(value.median)} [{_number(value.lower)}, {_number(value.upper)}]"


def _points(value: Percentiles | None, factor: float) -> str:
    if value is None:
        return _NONE
    points = [factor * point for point in (value.p50, value.p95, value.p99)]
    return "/".join(f"{point:.2g}" if point < 10 else f"{point:,.0f}" for point in points)


def _number(value: float | None, factor: float = 1.0) -> str:
    if value is None:
        return _NONE
    value *= factor
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
