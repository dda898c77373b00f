"""Files that survive a kill: JSON lines, CSV tables, results that resume."""

from __future__ import annotations

import csv
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from xml.etree import ElementTree

_KIND = "h2okv evaluation"
_VERSION = 1

Result = Mapping[str, Any]
"""What one sample gave: JSON values by name."""


class ResultFile:
    """Results of samples, in JSON lines.

    The first line says what the file is. Then follow, in any order, lines with ``cell`` and
    ``identity`` (a run's name and all that its results depend on), with ``versions`` (the code
    that wrote what follows), and with ``cell``, ``sample`` and ``result``.

    A line that a killed run has not finished is dropped. What is appended is on the disk when
    `add` returns.
    """

    def __init__(self, path: Path, versions: Mapping[str, str]) -> None:
        self.path = path
        self._identities: dict[str, dict[str, Any]] = {}
        self._results: dict[str, dict[int, Result]] = {}
        self._versions: dict[str, list[Mapping[str, str]]] = {}
        self._current: Mapping[str, str] = {}
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            _lock(self._file, path)
            length = self._read()
            self._file.truncate(length)
        except (OSError, ValueError) as error:
            self._file.close()
            if isinstance(error, OSError):
                raise self._unwritable(error) from error
            raise
        if not length:
            self._append([{"kind": _KIND, "version": _VERSION}])
        if dict(self._current) != dict(versions):
            self._append([{"versions": dict(versions)}])
        self._current = dict(versions)

    def __enter__(self) -> ResultFile:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the file; its results are there already."""
        self._file.close()

    def open_cell(self, cell: str, identity: Mapping[str, Any]) -> None:
        """Begins a run, or goes on with it."""
        wanted = json.loads(json.dumps(identity))
        held = self._identities.get(cell)
        if held is None:
            self._append([{"cell": cell, "identity": wanted}])
            self._identities[cell] = wanted
            return
        for name in [*wanted, *held]:
            if held.get(name) != wanted.get(name):
                raise ValueError(
                    f"'{self.path}' holds results of {cell} with {name} {held.get(name)!r}, not"
                    f" {wanted.get(name)!r}; run with what it was begun with, or choose another"
                    " file"
                )

    def results(self, cell: str) -> dict[int, Result]:
        """Returns a run's results by sample."""
        return dict(self._results.get(cell, {}))

    def versions(self, cell: str) -> dict[str, str]:
        """Tells which code computed a run's results."""
        found = self._versions.get(cell) or [self._current]
        names = dict.fromkeys(name for one in found for name in one)
        return {name: " ".join(dict.fromkeys(one.get(name, "") for one in found)) for name in names}

    def add(self, cell: str, results: Mapping[int, Result]) -> None:
        """Appends results, all of them or, if the machine fails, some."""
        self._append([{"cell": cell, "sample": n, "result": dict(r)} for n, r in results.items()])
        for sample, result in results.items():
            self._note(cell, sample, result)

    def _note(self, cell: str, sample: int, result: Result) -> None:
        self._results.setdefault(cell, {})[sample] = result
        seen = self._versions.setdefault(cell, [])
        if self._current not in seen:
            seen.append(self._current)

    def _append(self, entries: list[dict[str, Any]]) -> None:
        lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]
        try:
            # A lone half of a surrogate pair, which a model's bytes may decode to, stays readable.
            self._file.write("".join(lines).encode("utf-8", errors="replace"))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def _read(self) -> int:
        """Reads what is there, and returns the length of what is complete."""
        data = self.path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]
        first = complete.split(b"\n", 1)[0]
        if data and not self._is_first(first) and not (not complete and _begins_first(data)):
            raise ValueError(
                f"'{self.path}' does not hold results of an evaluation (its first line says"
                " something else); choose another file"
            )
        for number, line in enumerate(complete.split(b"\n")[1:-1], start=2):
            self._take(line, f"line {number} of '{self.path}'")
        return len(complete)

    @staticmethod
    def _is_first(line: bytes) -> bool:
        try:
            return bool(json.loads(line) == {"kind": _KIND, "version": _VERSION})
        except ValueError:
            return False

    def _take(self, line: bytes, where: str) -> None:
        """Takes a complete line."""
        remedy = "correct or remove the line, or begin again with another file"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}); {remedy}") from error
        shapes = {
            ("versions",): (dict,),
            ("cell", "identity"): (str, dict),
            ("cell", "sample", "result"): (str, int, dict),
        }
        shape = shapes.get(tuple(entry)) if isinstance(entry, dict) else None
        if shape is None:
            raise ValueError(f"{where} is none that an evaluation writes; {remedy}")
        for (name, value), kind in zip(entry.items(), shape, strict=True):
            if not isinstance(value, kind):
                raise ValueError(f"{where}: field {name} is {value!r}; {remedy}")
        if "versions" in entry:
            self._current = entry["versions"]
        elif "identity" in entry:
            self._identities[entry["cell"]] = entry["identity"]
        elif entry["cell"] not in self._identities:
            raise ValueError(
                f"{where}: field cell is {entry['cell']!r}, a run that no line before describes;"
                f" {remedy}"
            )
        else:
            self._note(entry["cell"], entry["sample"], entry["result"])

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"'{self.path}' cannot be written ({error.strerror}); what it holds stays, choose"
            " another place or make room"
        )


def _lock(file: BinaryIO, path: Path) -> None:
    """Keeps a second run away from a file as long as it is open."""
    try:
        import fcntl
    except ImportError:  # a system without it
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(
            f"'{path}' is being written by another run; wait for it, or choose another file"
        ) from error


def _begins_first(data: bytes) -> bool:
    """Tells whether this is the beginning of a first line that was not finished."""
    return json.dumps({"kind": _KIND, "version": _VERSION}).encode().startswith(data)


class RowFile:
    """A CSV file to which rows are added, so that a stopped run keeps what it has."""

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


Row = Mapping[str, Any]


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Writes a table; whoever finds the file finds all of it."""
    rows = list(rows)
    assert rows, path
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    partial.replace(path)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Reads a table back."""
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


TableRow = Mapping[str, Any]


def write_csv(path: Path, rows: Sequence[TableRow]) -> None:
    """Writes a table; whoever finds the file finds all of it."""
    columns = _columns(rows)
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(
                [_cell_result_table(row.get(name)) for name in columns] for row in rows
            )
        fresh.replace(path)
    except OSError as error:
        raise ValueError(
            f"'{path}' cannot be written ({error.strerror}); choose another place"
        ) from error


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Makes a Markdown table."""
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


def _cell_result_table(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return _cell_result_table(value).replace("|", "\\|")


def read_text_file(path: Path) -> str:
    """Reads a text file."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"'{path}' cannot be read ({reason}); give a text file") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{path}' is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from error
    if not text.strip():
        raise ValueError(f"'{path}' is empty; give a file with some text")
    return text.removeprefix("\ufeff")


@dataclass(frozen=True)
class JsonLine:
    """One line.

    Attributes:
        fields: Its object.
        where: The line's number and the file, for messages.
    """

    fields: dict[str, Any]
    where: str

    def text(self, name: str) -> str:
        """Takes a field that holds a text."""
        return checked_text(self._field(name), f"{self.where}: field {name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """Takes a field that holds a text or a list of texts."""
        found = self._field(name)
        entries = found if isinstance(found, list) else [found]
        if not entries:
            raise ValueError(f"{self.where}: field {name} is an empty list; give at least one text")
        where = f"{self.where}: field {name}"
        return tuple(checked_text(entry, where) for entry in entries)

    def number(self, name: str, default: int) -> int:
        """Takes a field that holds a whole number of 1 or more, if it is there."""
        found = self.fields.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ValueError(
                f"{self.where}: field {name} is {found!r}; give a whole number of 1 or more"
            )
        return found

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{self.where} has no field {name}; add it, or remove the line")
        return self.fields[name]


def read_objects(path: Path, wanted: str) -> list[JsonLine]:
    """Reads all lines; blank ones are passed over."""
    # Not splitlines, which also parts at characters that may stand in a JSON string.
    lines = read_text_file(path).split("\n")
    return [
        JsonLine(_object(line, f"line {number} of '{path}'", wanted), f"line {number} of '{path}'")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _object(line: str, where: str, wanted: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply; give {wanted}") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); correct or remove it") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is not a JSON object; give {wanted}")
    return fields


def checked_text(entry: Any, where: str) -> str:
    """Makes sure that a value is a text with something in it."""
    if not isinstance(entry, str) or not entry.strip():
        raise ValueError(f"{where} is not a text; give a string that is not empty")
    try:
        entry.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair; correct the text") from error
    return entry


@dataclass(frozen=True)
class Record:
    """One entry of a data file.

    Attributes:
        place: file and line (or item) for messages.
        fields: what stands there, by name.
    """

    place: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        """Returns a field that must hold a text."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            self.refuse(name, "is missing or has no text")
        return str(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> int:
        """Returns which of a few values a field has."""
        value = str(self.fields.get(name))
        if value not in allowed:
            self.refuse(name, f"is {value!r} and must be one of {', '.join(allowed)}")
        return allowed.index(value)

    def refuse(self, name: str, what: str) -> None:
        """Raises for a field."""
        raise ValueError(
            f"{self.place}: field {name!r} {what}; repair the line or get the file again."
        )


def read_json_lines(path: Path) -> Iterator[Record]:
    """Reads a file with one JSON object on each line; empty lines are passed over."""
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _object_records(f"{path}, line {number}", line)


def read_json_list(path: Path) -> Iterator[Record]:
    """Reads a file that is one JSON list of objects."""
    try:
        entries = json.loads("\n".join(_lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: {error.msg}; get the file again."
        ) from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds no JSON list; get the file again.")
    for number, entry in enumerate(entries, start=1):
        place = f"{path}, entry {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{place} is no JSON object; get the file again.")
        yield Record(place, entry)


def read_tsv(path: Path) -> Iterator[Record]:
    """Reads a table with tabs between the columns and their names in the first line."""
    rows = csv.DictReader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    for row in rows:
        yield Record(f"{path}, line {rows.line_num}", dict(row))


def read_items(path: Path) -> Iterator[Record]:
    """Reads an XML file's ``item`` elements: attributes and the texts of its children."""
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError) as error:
        raise ValueError(
            f"{path} is no readable XML file ({error}); get the file again."
        ) from error
    for number, item in enumerate(root.iter("item"), start=1):
        fields = dict(item.attrib) | {child.tag: child.text for child in item}
        yield Record(f"{path}, item {item.get('id', number)}", fields)


def _object_records(place: str, line: str) -> Record:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: {error.msg}; repair the line or get the file again.") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is no JSON object; repair the line or get the file again.")
    return Record(place, entry)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error}); get the file again.") from error


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """Makes the error for an unknown name."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"{what} {name!r} is unknown; {hint}choose from {', '.join(names)}")
