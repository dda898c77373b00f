"""The CSV file that gets every row as soon as it is measured."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RowFile:
    """A CSV file to which rows are added, so that a stopped run keeps what it has.

    Args:
        path: The file; rows are added behind those that it holds.
        columns: Its header.

    Raises:
        ValueError: If it holds something else, or cannot be written.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        try:
            is_new = not path.exists() or path.stat().st_size == 0
            if not is_new:
                self._check_header(columns)
            self._file = path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"--csv '{path}' cannot be written ({error.strerror}); choose another place"
            ) from error
        self._writer = csv.DictWriter(self._file, columns)
        if is_new:
            self._writer.writeheader()
            self._file.flush()

    def append(self, cells: Mapping[str, Any]) -> None:
        """Adds one row; it is with the operating system when this returns."""
        self._writer.writerow({name: _text(value) for name, value in cells.items()})
        self._file.flush()

    def close(self) -> None:
        """Closes the file; its rows are there already."""
        self._file.close()

    def _check_header(self, columns: Sequence[str]) -> None:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                header = next(csv.reader(file), [])
        except (UnicodeDecodeError, csv.Error):
            header = []
        if header != list(columns):
            raise ValueError(
                f"--csv '{self.path}' holds other columns than this benchmark's; choose another"
                " file, or move it away"
            )


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
