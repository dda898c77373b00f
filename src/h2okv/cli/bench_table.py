"""What a benchmark prints: tables for people, one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from h2okv.benchmarking.clock import Spread
from h2okv.benchmarking.max_batch import MaxBatchRow
from h2okv.benchmarking.row import Row
from h2okv.benchmarking.settings import CacheChoice
from h2okv.cli.report import format_bytes

_NONE = "-"
_WIDTH = 190


def comparison_table(rows: Sequence[Row]) -> str:
    """Sets the caches side by side.

    Args:
        rows: What was measured.

    Returns:
        The table as text, without colours.
    """
    return _table(
        [row for row in rows if row.status == "ok"],
        {
            "dtype": lambda r: r.dtype,
            "context": lambda r: f"{r.context:,}",
            "batch": lambda r: str(r.batch),
            "cache": lambda r: CacheChoice(r.cache, r.budget, kv_bits=r.kv_bits).label,
            "prefill, s": lambda r: _spread(r.prefill),
            "of full": lambda r: _spread(r.prefill_ratio),
            "step, ms": lambda r: _spread(r.decode, 1e3),
            "tokens/s": lambda r: _number(r.tokens_per_second),
            "cache held": lambda r: _bytes(r.cache_bytes),
            "peak": lambda r: _bytes(r.peak_bytes),
            "speed-up": lambda r: _spread(r.speedup),
            "limit": lambda r: _number(r.limit),
            "reached": lambda r: _percent(r.share),
            "GB/s": lambda r: _number(None if r.achieved is None else r.achieved / 1e9),
        },
    )


def left_out(rows: Sequence[Row]) -> list[str]:
    """Says which caches gave no figure, and why, each once."""
    lines = {f"{row.cache}: {row.status}": None for row in rows if row.status != "ok"}
    return list(lines)


def max_batch_table(rows: Sequence[MaxBatchRow]) -> str:
    """Sets the largest batches side by side.

    Args:
        rows: What was measured.

    Returns:
        The table as text, without colours.
    """
    return _table(
        rows,
        {
            "dtype": lambda r: r.dtype,
            "context": lambda r: f"{r.context:,}",
            "cache": lambda r: CacheChoice(r.cache, r.budget, kv_bits=r.kv_bits).label,
            "one cache": lambda r: _bytes(r.cache_bytes),
            "one forward": lambda r: _bytes(r.activation_bytes),
            "largest batch": lambda r: f"{r.max_batch:,}",
            "verified": lambda r: "yes" if r.is_verified else "no",
            "run with": lambda r: str(r.run_batch),
            "peak": lambda r: _bytes(r.peak_bytes),
            "prefill, s": lambda r: _spread(r.prefill),
            "step, ms": lambda r: _spread(r.decode, 1e3),
            "tokens/s": lambda r: _number(r.tokens_per_second),
            "against full": lambda r: _spread(r.throughput_ratio),
        },
    )


def to_json(
    environment: Mapping[str, str],
    bandwidth: float | None,
    checks: Mapping[str, Any],
    rows: Sequence[Row] | Sequence[MaxBatchRow],
) -> str:
    """Makes the object that `--json` prints.

    Args:
        environment: Of `h2okv.benchmarking.environment`.
        bandwidth: In bytes for each second.
        checks: By dtype.
        rows: What was measured.

    Returns:
        One JSON object on one line.
    """
    result = {
        "environment": dict(environment),
        "bandwidth": bandwidth,
        "checks": dict(checks),
        "rows": [row.cells() for row in rows],
    }
    return json.dumps(result, allow_nan=False)


def _table(rows: Sequence[Any], cells: Mapping[str, Callable[[Any], str]]) -> str:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in cells:
        is_text = heading in ("dtype", "cache")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for cell in cells.values()))
    # Rendered to text, so that a closed pipe shows where the text is written and nowhere else.
    console = Console(width=_WIDTH)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _spread(value: Spread | None, factor: float = 1.0) -> str:
    if value is None:
        return _NONE
    middle, lower, upper = (
        _number(factor * part) for part in (value.median, value.lower, value.upper)
    )
    return f"{middle} [{lower}, {upper}]"


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _bytes(value: int | None) -> str:
    return _NONE if value is None else format_bytes(value)
