"""Tables of results as CSV files: written whole or not at all."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Writes a table; whoever finds the file finds all of it.

    Args:
        path: the CSV file; its folder must exist.
        rows: mappings with the same keys; numbers are written with six digits.
    """
    rows = list(rows)
    assert rows, path
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    partial.replace(path)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Reads a table back.

    Args:
        path: a CSV file of `write_table`.

    Returns:
        One dict for each row; what reads as a number is one.
    """
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {key: value if key in _TEXT else _number(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


_TEXT = ("word", "policy", "condition", "case", "of", "against", "measure", "h", "objective")
"""Columns that hold text, even where it reads as a number (a word may be "7")."""


def _cell(value: Any) -> Any:
    if isinstance(value, (bool, str, int)):
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 1e15 else f"{number:.6g}"


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
