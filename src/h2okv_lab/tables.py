"""Results in files: tables, figures, what they were made with; and the data of people's files."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from h2okv.console import optional
from h2okv.records import Record, atomic_write, check_text, naming, read_text_file, refusing

if TYPE_CHECKING:
    import torch

Row = Mapping[str, Any]  # of a table: values by column


def check_minimum(minimum: int = 1, /, **counts: int | None) -> None:
    """Raise ValueError for a number below `minimum`; the keywords are the names of options."""
    for name, count in counts.items():
        if count is not None and count < minimum:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {count} is too few; give {minimum} or more")


class Entry(Record):
    """One entry of a data file, whose fields are checked as they are read."""

    def text(self, name: str) -> str:
        """Return a field that must be a text."""
        return check_text(self._field(name), f"{self.location}: field {name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that must be a text or a list of texts."""
        value = self._field(name)
        if value == []:
            self.refuse(name, "is an empty list; give at least one text")
        entries = value if isinstance(value, list) else [value]
        return tuple(check_text(entry, f"{self.location}: field {name}") for entry in entries)

    def number(self, name: str, default: int) -> int:
        """Return an optional field that must be a whole number of 1 or more."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(name, f"is {value!r}; give a whole number of 1 or more")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> int:
        """Return the index of a field's value among the allowed ones."""
        value = str(self.fields.get(name))
        if value not in allowed:
            self.refuse(name, f"is {value!r}; give one of {', '.join(allowed)}")
        return allowed.index(value)

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise ValueError for a field."""
        raise ValueError(f"{self.location}: field {name} {problem}")

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{self.location} has no field {name}; add it, or remove the entry")
        return self.fields[name]


def check_distinct(**lists: Sequence[Any]) -> None:
    """Raise ValueError for an empty list, or one with a value twice; keywords are options."""
    for name, values in lists.items():
        if not values:
            raise ValueError(f"--{name} must have at least one value, got none; add one")
        if len(set(values)) != len(values):
            raise ValueError(f"--{name} must have each value once, got {values!r}")


def read_jsonl(path: Path, expected: str = "an object") -> list[Entry]:
    """Read a file with one JSON object on each line; skip blank lines."""
    # splitlines would also split at characters that a JSON string may contain.
    lines = enumerate(read_text_file(path, "JSONL").split("\n"), start=1)
    return [
        Entry.parse(line, f"line {number} of '{path}'", expected)
        for number, line in lines
        if line.strip()
    ]


def write_csv(path: Path, rows: Iterable[Row], columns: Sequence[str] | None = None) -> None:
    """Write a table atomically."""
    rows = list(rows)
    columns = _columns(rows) if columns is None else columns
    with atomic_write(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([csv_cell(row.get(name)) for name in columns] for row in rows)


def read_csv(path: Path, text: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read a table of `write_csv`: numbers as numbers, empty cells as ``None``."""
    with naming(path, "read", "give a CSV file"):
        data = path.read_bytes()
    problem = f"'{path}' is not a valid table"
    with refusing(problem, "choose another file", ValueError, csv.Error):
        reader = csv.DictReader(io.StringIO(data.decode("utf-8"), newline=""))
        return [
            {name: value if name in text else _number(value) for name, value in row.items()}
            for row in reader
        ]


class CsvFile:
    """A CSV file that hands each row to the operating system at once."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)
        with naming(path, "written", "choose another path"):
            data = path.read_bytes() if path.exists() else b""
            first = data.partition(b"\n")[0].decode("utf-8", errors="replace")
            if data and next(csv.reader([first]), []) != self.columns:
                raise ValueError(
                    f"'{path}' holds other columns than {','.join(columns)[:60]}...; choose"
                    " another file, or move it away"
                )
            self._file = path.open("a", newline="", encoding="utf-8")
            self._file.truncate(data.rfind(b"\n") + 1)  # a kill may have truncated the last row
        if b"\n" not in data:
            self._write(self.columns)

    def append(self, row: Row) -> None:
        """Append a row."""
        self._write([csv_cell(row.get(name)) for name in self.columns])

    def _write(self, cells: Sequence[str]) -> None:
        with naming(self.path, "written", "choose another path"):
            csv.writer(self._file, lineterminator="\n").writerow(cells)
            self._file.flush()

    def close(self) -> None:
        """Close the file, whose rows are written already."""
        self._file.close()


def csv_cell(value: Any) -> str:
    """Format a value as a cell: numbers to six digits, whole ones without a point."""
    if value is None:
        return ""
    if isinstance(value, bool | str | Integral) or not isinstance(value, Real):
        return str(value)
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else f"{number:.6g}"


def _number(cell: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell or None


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of all rows; a column of later rows only keeps its position in them."""
    columns: list[str] = []
    for row in rows:
        index = 0
        for name in row:
            if name not in columns:
                columns.insert(index, name)
            index = columns.index(name) + 1
    return columns


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a Markdown table; align columns of figures to the right."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    bars = "|".join("---:" if _is_figures(cells, n) else "---" for n in range(len(header)))
    first, *others = [f"| {' | '.join(row)} |\n" for row in (header, *cells)]
    return "".join([first, f"|{bars}|\n", *others])


def _is_figures(cells: Sequence[Sequence[str]], column: int) -> bool:
    texts = [row[column] for row in cells if row[column]]
    return bool(texts) and all(text.lstrip("-")[:1].isdigit() for text in texts)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return csv_cell(value).replace("|", "\\|")


# --- what results were made with ------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of the package, its libraries and the commit."""
    return {
        "h2okv": importlib.metadata.version("h2okv"),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "commit": commit(),
    }


@cache
def commit() -> str:
    """Return the short commit of the source, with "+" if changed; "" outside a repository."""
    source = Path(__file__).parents[1]
    if not (source.parent / ".git").exists():
        return ""

    def git(*args: str) -> str:
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(source), *args]
            process = subprocess.run(command, capture_output=True, text=True, timeout=10)
            return process.stdout.strip()
        return ""

    name = git("rev-parse", "--short", "HEAD")
    return name + ("+" if name and git("status", "--porcelain", "--", "*.py") else "")


def environment(device: torch.device) -> dict[str, str]:
    """Return date, versions, machine and device by name."""
    import torch

    from h2okv.provenance import processor

    code = versions()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": code["h2okv"],
        "commit": code["commit"],
        "machine": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "python": platform.python_version(),
        "torch": code["torch"],
        "transformers": code["transformers"],
        "threads": str(torch.get_num_threads()),
    }


# --- figures --------------------------------------------------------------------------------------

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles and markers help
# in greyscale.
BLUE, RED, GREEN, PINK, SKY, ORANGE = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00",
)  # fmt: skip
MARKERS = "osD^vPX*"


def check_plot(path: Path) -> None:
    """Raise ValueError, before a long run, if its figure cannot be drawn or has a wrong suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"'{path}' is not the name of a figure; it must end in {', '.join(SUFFIXES)}"
        )
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches."""
    figure = optional("matplotlib.figure", "a picture", "plot")
    return figure.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file."""
    with naming(path, "written", "choose another path"):
        figure.savefig(path, dpi=150)
