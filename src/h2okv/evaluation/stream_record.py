"""The rows of a stream, and the CSV file that gets them one by one."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """What was measured since the row before.

    Attributes:
        position: Tokens of the stream that have been through the cache.
        nll: Mean negative log-likelihood of the tokens that followed those read since the last
            row, in nats for each token.
        step_seconds: Median time of one block's forward pass in that interval, in seconds.
        rss_bytes: Resident memory of the process at that position; None where it is not known.
        cache_bytes: What the cache held at that position.
    """

    position: int
    nll: float
    step_seconds: float
    rss_bytes: int | None
    cache_bytes: int


COLUMNS = tuple(field.name for field in fields(Row))
"""The header of the CSV file."""


class RowFile:
    """A CSV file that holds every row as soon as it is known, so that a killed run keeps them.

    Args:
        path: The file.
        rows: Rows of an earlier run that stand at its beginning. Without them (None) the file
            must be new.

    Raises:
        ValueError: If the file is there already and is not to be gone on with, or holds something
            else than a stream's rows, or cannot be written.
    """

    def __init__(self, path: Path, rows: Sequence[Row] | None = None) -> None:
        self.path = path
        if rows is None and path.exists():
            raise ValueError(
                f"'{path}' exists already; go on with it by --resume, move it away, or choose"
                " another name"
            )
        if path.exists():
            _check_header(path)
        try:
            # A new file in its place, not a file cut short: at no moment are rows missing.
            fresh = path.with_name(f"{path.name}.new")
            with fresh.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows(_cells(row) for row in rows or ())
            os.replace(fresh, path)
            self._file = path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error
        self._writer = csv.writer(self._file)

    def append(self, rows: Iterable[Row]) -> None:
        """Adds rows; they are with the operating system when this returns.

        Raises:
            ValueError: If the file cannot be written any more.
        """
        try:
            self._writer.writerows(_cells(row) for row in rows)
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Closes the file; its rows are there already."""
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file that `RowFile` wrote.

    Args:
        path: The file.

    Returns:
        The rows in their order.

    Raises:
        ValueError: If it is not such a file.
    """
    _check_header(path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = []
        for number, cells in enumerate(csv.DictReader(file), start=2):
            try:
                rows.append(
                    Row(
                        int(cells["position"]),
                        float(cells["nll"]),
                        float(cells["step_seconds"]),
                        int(cells["rss_bytes"]) if cells["rss_bytes"] else None,
                        int(cells["cache_bytes"]),
                    )
                )
            except (TypeError, ValueError) as error:
                raise ValueError(f"line {number} of '{path}' is no row of a stream") from error
    return rows


def _check_header(path: Path) -> None:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        header = []
    if tuple(header) != COLUMNS:
        raise ValueError(
            f"'{path}' does not hold a stream's rows (its first line is not"
            f" {','.join(COLUMNS)}); choose another file"
        )


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"'{path}' cannot be written ({error.strerror}); choose another place")


def _cells(row: Row) -> tuple[Any, ...]:
    # repr gives a float back exactly; None becomes an empty cell.
    return (
        row.position,
        repr(row.nll),
        f"{row.step_seconds:.6g}",
        row.rss_bytes,
        row.cache_bytes,
    )
