"""Shared by the benchmarks: interleaved timing, targets, and tidy CSV rows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from h2okv.models.loading import resolve_model
from h2okv.offload.profile import Clock
from h2okv.ops.dispatch import implementation_in_use
from h2okv_lab.benchmarking.results import interleaved, quartiles, ratios
from h2okv_lab.tables import environment as describe
from h2okv_lab.tables import read_csv, write_csv

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    "date", "commit", "machine", "python", "torch", "transformers", "threads", "ops",
    "model", "dtype", "kv_heads", "batch", "prompt", "budget",
    "measure", "implementation", "unit", "median", "lower_quartile", "upper_quartile", "rounds",
    "against", "ratio", "ratio_lower", "ratio_upper", "target", "met",
)  # fmt: skip
"""Columns: machine and code, the setting, the value with its spread, and the ratio."""


@dataclass(frozen=True)
class Target:
    """The limit of a ratio.

    Attributes:
        against: the implementation to compare with.
        limit: the ratio's limit; ``None`` only reports it.
        at_least: True if ``against / own`` must reach the limit (a speed-up), False if
            ``own / against`` must stay below it (an overhead).
    """

    against: str
    limit: float | None = None
    at_least: bool = False


def interleave(
    runs: dict[str, Callable[[], Any]],
    rounds: int,
    warmup: int,
    label: str,
    device: torch.device | None = None,
) -> dict[str, list[float]]:
    """Time callables in turn, after ``warmup`` calls of each; name to seconds by round."""
    clock = Clock(device or torch.device("cpu"))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in interleaved(list(runs), warmup + rounds):
        progress(f"{label}: round {max(number - warmup + 1, 0)} of {rounds}")
        seconds = clock.seconds(runs[name])
        if number >= warmup:
            samples[name].append(seconds)
    progress("")
    return samples


def progress(text: str) -> None:
    """Show one line on stderr that the next one overwrites."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def rows_for(
    measure: str,
    unit: str,
    samples: dict[str, list[float]],
    targets: list[Target],
    setting: dict[str, Any],
    subject: str = "h2o",
) -> list[dict[str, Any]]:
    """Make the CSV rows of one measure, one for each implementation.

    The row of an implementation that a target names carries the ratio with ``own``: the median,
    and the quartiles, of the ratios within one round.
    """
    rows = []
    by_name = {target.against: target for target in targets}
    for name, samples_of_name in samples.items():
        row = {**setting, "measure": measure, "implementation": name, "unit": unit}
        values = quartiles("found", samples_of_name).values()
        names = ("median", "lower_quartile", "upper_quartile")
        row |= {key: f"{value:.6g}" for key, value in zip(names, values, strict=True)}
        row["rounds"] = len(samples_of_name)
        target = by_name.get(name)
        if target is not None:
            pair = (
                (samples_of_name, samples[subject])
                if target.at_least
                else (samples[subject], samples_of_name)
            )
            ratio = quartiles("ratio", ratios(*pair))
            row["against"] = f"{name} / {subject}" if target.at_least else f"{subject} / {name}"
            row |= {key: f"{value:.3f}" for key, value in ratio.items()}
            if target.limit is not None:
                gap = ratio["ratio"] - target.limit
                row["target"] = f"{'>=' if target.at_least else '<='} {target.limit}"
                row["met"] = "yes" if (gap >= 0 if target.at_least else gap <= 0) else "no"
        rows.append(row)
    return rows


def report(path: Path, rows: list[dict[str, Any]]) -> None:
    """Show rows, and add them to a CSV file; an older file gets new columns, empty."""
    show(rows)
    before = read_csv(path, text=FIELDS) if path.exists() else []  # "504e778" is not a number
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, [*before, *rows], FIELDS)


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows for a reader."""
    for row in rows:
        text = (
            f"{row['dtype']:>8}  {row['measure']:<22} {row['implementation']:<8} "
            f"{float(row['median']):10.4g} {row['unit']:<4} "
            f"[{float(row['lower_quartile']):.4g}, {float(row['upper_quartile']):.4g}]"
        )
        if row.get("ratio"):
            text += f"   {row['against']} = {row['ratio']} "
            text += f"[{row['ratio_lower']}, {row['ratio_upper']}]"
        if row.get("target"):
            text += f", target {row['target']}: {row['met']}"
        print(text, flush=True)


def environment() -> dict[str, Any]:
    """Return the columns that describe machine and code."""
    row = describe(torch.device("cpu")) | {"ops": implementation_in_use()}
    if "Xeon" in row["machine"] and not torch.cpu._is_amx_tile_supported():
        row["machine"] = row["machine"].replace(",", " without AMX,")  # virtual ones share a name
    return {name: row[name] for name in FIELDS if name in row}


def load_pair(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load a model under SDPA and the same under H2O attention, with shared tensors.

    Ends the program with a sentence if there is no such model.
    """
    try:
        plain = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=dtype).eval()
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    return plain, with_h2o(plain)


def with_h2o(plain: PreTrainedModel) -> PreTrainedModel:
    """Return the same model under H2O attention, with the same tensors."""
    h2o_model = type(plain)._from_config(copy.deepcopy(plain.config), attn_implementation="h2o")
    h2o_model.load_state_dict(plain.state_dict(), assign=True)
    h2o_model.tie_weights()
    return h2o_model.eval()
