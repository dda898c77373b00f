"""What `h2okv bench serve` prints: a table for people, one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from h2okv.benchmarking.load.measurement import Measured
from h2okv.benchmarking.load.summary import Percentiles

_NONE = "-"
_WIDTH = 200
_LATE = 0.05


def serve_table(rows: Sequence[Measured]) -> str:
    """Sets the loads side by side.

    Args:
        rows: What was measured.

    Returns:
        The table as text, without colours.
    """
    cells: dict[str, Callable[[Measured], str]] = {
        "server": lambda r: r.server,
        "load": _load,
        "done": lambda r: f"{r.summary.finished}/{r.summary.requests}",
        "errors": lambda r: str(r.summary.failed),
        "prompt": lambda r: _count(r.summary.prompt_tokens),
        "new": lambda r: _count(r.summary.new_tokens),
        "requests/s": lambda r: f"{r.summary.requests_per_second:.3g}",
        "new tokens/s": lambda r: _number(r.summary.new_tokens_per_second),
        "all tokens/s": lambda r: _number(r.summary.total_tokens_per_second),
        "first token, s": lambda r: _points(r.summary.first_token, 1),
        "per token, ms": lambda r: _points(r.summary.per_token, 1e3),
        "gap, ms": lambda r: _points(r.summary.gap, 1e3),
    }
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="times: p50 / p95 / p99",
        caption_justify="left",
    )  # fmt: skip
    for heading in cells:
        is_text = heading in ("server", "load")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for cell in cells.values()))
    console = Console(width=_WIDTH)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def serve_remarks(rows: Sequence[Measured]) -> list[str]:
    """Says what a reader of the table must know: errors, how tokens were counted, lateness."""
    lines: dict[str, None] = {}
    for row in rows:
        summary = row.summary
        for kind, count in summary.errors.items():
            lines[f"{row.server}, {_load(row)}: {count} x {kind}: {summary.messages[kind]}"] = None
        if summary.interrupted:
            lines[
                f"{row.server}, {_load(row)}: stopped; {summary.interrupted} requests were under"
                " way, which count nowhere"
            ] = None
        if summary.counted_by in ("pieces", "both"):
            told = "not" if summary.counted_by == "pieces" else "not always"
            lines[
                f"{row.server}: the server does {told} tell token counts; pieces of the stream are"
                " counted instead"
            ] = None
        if summary.lateness is not None and summary.lateness.p95 > _LATE:
            lines[
                f"{row.server}, {_load(row)}: requests were sent up to"
                f" {summary.lateness.p95:.2f} s late (p95); this machine is too slow for the rate"
            ] = None
    return list(lines)


def serve_json(environment: Mapping[str, str], rows: Sequence[Measured]) -> str:
    """Makes the object that `--json` prints.

    Args:
        environment: Of `h2okv.benchmarking.environment`.
        rows: What was measured.

    Returns:
        One JSON object on one line.
    """
    told = []
    for row in rows:
        errors = {"errors": row.summary.errors, "messages": row.summary.messages}
        told.append({**row.cells(), **errors})
    return json.dumps({"environment": dict(environment), "rows": told}, allow_nan=False)


def _load(row: Measured) -> str:
    load = row.load
    return f"{load.clients} clients" if load.rate is None else f"{load.rate:g}/s"


def _points(value: Percentiles | None, factor: float) -> str:
    if value is None:
        return _NONE
    return " / ".join(f"{factor * point:.3g}" for point in (value.p50, value.p95, value.p99))


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"
