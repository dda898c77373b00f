"""What every benchmark shares: interleaved timing, the environment, and tidy CSV rows."""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h2okv.ops.dispatch import wanted
from h2okv.provenance import environment as describe

FIELDS = (
    "date", "commit", "machine", "python", "torch", "transformers", "threads", "ops",
    "model", "dtype", "kv_heads", "batch", "prompt", "budget",
    "measure", "implementation", "unit", "median", "lower_quartile", "upper_quartile", "rounds",
    "against", "ratio", "ratio_lower", "ratio_upper", "target", "met",
)  # fmt: skip
"""The columns: where and what, the setting, the value with its spread, and h2o's ratio."""


@dataclass(frozen=True)
class Target:
    """What a ratio is held to.

    Attributes:
        against: the implementation that h2o is compared with.
        limit: the ratio's limit.
        at_least: True if ``against / h2o`` must reach the limit (a speed-up), False if
            ``h2o / against`` must stay below it (an overhead).
    """

    against: str
    limit: float
    at_least: bool = False


def interleave(
    runs: dict[str, Callable[[], None]], rounds: int, warmup: int, label: str
) -> dict[str, list[float]]:
    """Times callables in turn, so that a slow moment of the machine hits all of them.

    Args:
        runs: name to callable; one call is one sample.
        rounds: samples of each.
        warmup: further calls of each, before, that do not count.
        label: shown with the progress.

    Returns:
        Name to seconds, in order of the rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-warmup, rounds):
        progress(f"{label}: round {max(number + 1, 0)} of {rounds}")
        # The order changes, so that none always runs in another one's warm or cold cache.
        names = list(runs) if number % 2 else list(reversed(runs))
        for name in names:
            start = time.perf_counter()
            runs[name]()
            if number >= 0:
                samples[name].append(time.perf_counter() - start)
    progress("")
    return samples


def progress(text: str) -> None:
    """Shows one line on stderr that the next one overwrites."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def rows_for(
    measure: str,
    unit: str,
    samples: dict[str, list[float]],
    targets: list[Target],
    setting: dict[str, Any],
) -> list[dict[str, Any]]:
    """Makes the CSV rows of one measure: a row for each implementation.

    A row of another implementation carries h2o's ratio against it: the median, and the quartiles,
    of the ratios within one round.

    Args:
        measure: what was measured.
        unit: of the samples.
        samples: implementation to samples; ``"h2o"`` among them.
        targets: what the ratios are held to.
        setting: the columns that say what ran where.

    Returns:
        The rows.
    """
    rows = []
    by_name = {target.against: target for target in targets}
    for name, values in samples.items():
        lower, middle, upper = quartiles(values)
        row = {
            **setting, "measure": measure, "implementation": name, "unit": unit,
            "median": f"{middle:.6g}", "lower_quartile": f"{lower:.6g}",
            "upper_quartile": f"{upper:.6g}", "rounds": len(values),
        }  # fmt: skip
        target = by_name.get(name)
        if target is not None:
            pairs = list(zip(samples["h2o"], values, strict=True))
            ratios = [other / own if target.at_least else own / other for own, other in pairs]
            low, ratio, high = quartiles(ratios)
            met = ratio >= target.limit if target.at_least else ratio <= target.limit
            row |= {
                "against": f"{name} / h2o" if target.at_least else f"h2o / {name}",
                "ratio": f"{ratio:.3f}", "ratio_lower": f"{low:.3f}", "ratio_upper": f"{high:.3f}",
                "target": f"{'>=' if target.at_least else '<='} {target.limit}",
                "met": "yes" if met else "no",
            }  # fmt: skip
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints rows for a reader."""
    for row in rows:
        text = (
            f"{row['dtype']:>8}  {row['measure']:<22} {row['implementation']:<8} "
            f"{float(row['median']):10.4g} {row['unit']:<4} "
            f"[{float(row['lower_quartile']):.4g}, {float(row['upper_quartile']):.4g}]"
        )
        if row.get("ratio"):
            text += (
                f"   {row['against']} = {row['ratio']} [{row['ratio_lower']}, "
                f"{row['ratio_upper']}], target {row['target']}: {row['met']}"
            )
        print(text, flush=True)


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a CSV file; one from before a column was added gets that column, empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            before = list(csv.DictReader(file))
    draft = path.with_suffix(".draft")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*before, *rows])
    draft.replace(path)


def environment() -> dict[str, Any]:
    """Returns the columns that say where a benchmark ran, and on which code."""
    told = describe(torch.device("cpu"))
    return {name: told[name] for name in FIELDS if name in told} | {"ops": wanted()}
