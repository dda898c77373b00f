"""Tables of results: CSV for machines, Markdown for people."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TableRow = Mapping[str, Any]


def write_csv(path: Path, rows: Sequence[TableRow]) -> None:
    """Writes a table; whoever finds the file finds all of it.

    Args:
        path: The file; an older one is replaced.
        rows: Values by column; a row may lack some, and numbers are written with six digits.

    Raises:
        ValueError: If it cannot be written.
    """
    columns = _columns(rows)
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
        fresh.replace(path)
    except OSError as error:
        raise ValueError(
            f"'{path}' cannot be written ({error.strerror}); choose another place"
        ) from error


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Makes a Markdown table.

    Args:
        header: The columns' names.
        rows: As many cells each; None is left empty.

    Returns:
        Its lines, numbers to the right.
    """
    cells = [[_shown(cell) for cell in row] for row in rows]
    bars = "|".join("---:" if _is_figures(cells, n) else "---" for n in range(len(header)))
    lines = [" | ".join(header), *(" | ".join(row) for row in cells)]
    return (
        "\n".join([f"| {lines[0]} |", f"|{bars}|", *(f"| {line} |" for line in lines[1:])]) + "\n"
    )


def _is_figures(cells: Sequence[Sequence[str]], column: int) -> bool:
    found = [row[column] for row in cells if row[column]]
    return bool(found) and all(text.lstrip("-")[:1].isdigit() for text in found)


def _columns(rows: Sequence[TableRow]) -> list[str]:
    """All columns; one that only later rows have stands where these have it."""
    columns: list[str] = []
    for row in rows:
        place = 0
        for name in row:
            if name in columns:
                place = columns.index(name) + 1
            else:
                columns.insert(place, name)
                place += 1
    return columns


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return _cell(value).replace("|", "\\|")
