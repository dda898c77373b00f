"""Files: written whole or not at all, results that resume, tables, and lines that people wrote."""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any, NoReturn, Self

Row = Mapping[str, Any]  # of a table: values by column
_SHOWN = 60  # characters of a wrong value that an error repeats


@contextmanager
def refusing(problem: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Makes errors of these kinds one sentence: the problem, the library's reason, the remedy."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{problem} ({first_line(error)}); {remedy}") from error


def first_line(error: BaseException) -> str:
    """What an error says, in so few words that they fit into a sentence."""
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__


def short_repr(value: Any) -> str:
    """Return a value as an error repeats it: ints may have more digits than Python prints."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def naming(path: Path, what: str, remedy: str) -> AbstractContextManager[None]:
    """Does so for a file that the system does not let be ``read`` or ``written``."""
    return refusing(f"'{path}' cannot be {what}", remedy, OSError)


def unknown_name(what: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is none of the known ones; it names the nearest."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"{what} {name!r} is unknown; {hint}choose from {', '.join(names)}")


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that is complete or not there: it is put in its place when it is on the disk."""
    # Of its own, whoever else writes this file, and whatever lies beside it.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with naming(path, "written", "choose another place, or make room"):
            with draft.open(mode.replace("w", "x"), **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            if os.name == "posix":  # where a folder's new name can be put on the disk, too
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Writes a file of JSON, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Reads JSON; what is nested too deeply is refused as what is no JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error


def read_text_file(path: Path, kind: str = "text") -> str:
    """Reads a text that a user names; an empty one, or one that is not UTF-8, is refused."""
    with naming(path, "read", f"give a {kind} file"):
        text = decode_text(path.expanduser().read_bytes(), f"'{path}'")
    if not text.strip():
        raise ValueError(f"'{path}' is empty; give a file with some text")
    return text


def decode_text(data: bytes, source: str) -> str:
    """Decodes UTF-8, without the byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from error


def check_text(entry: Any, place: str) -> str:
    """Makes sure that a value is a text with something in it."""
    if not isinstance(entry, str) or not entry.strip():
        raise ValueError(f"{place} is not a text; give a string that is not empty")
    try:
        entry.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has half of a surrogate pair; correct the text") from error
    return entry


@dataclass(frozen=True)
class Record:
    """One entry of a data file."""

    fields: dict[str, Any]
    place: str  # line and file, for messages

    @classmethod
    def parse(cls, line: str | bytes, place: str, wanted: str = "an object") -> Record:
        """Reads a line of JSON that must be an object."""
        try:
            fields = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{place} is nested too deeply; give {wanted}") from error
        except ValueError as error:
            raise ValueError(f"{place} is not JSON ({error}); correct or remove it") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{place} is not a JSON object; give {wanted}")
        return cls(fields, place)

    def text(self, name: str) -> str:
        """A field that holds a text."""
        return check_text(self._field(name), f"{self.place}: field {name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that holds a text or a list of texts."""
        found = self._field(name)
        if found == []:
            self.refuse(name, "is an empty list; give at least one text")
        entries = found if isinstance(found, list) else [found]
        return tuple(check_text(entry, f"{self.place}: field {name}") for entry in entries)

    def number(self, name: str, default: int) -> int:
        """A field that holds a whole number of 1 or more, if it is there."""
        found = self.fields.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self.refuse(name, f"is {found!r}; give a whole number of 1 or more")
        return found

    def choice(self, name: str, allowed: Sequence[str]) -> int:
        """Which of a few values a field has."""
        found = str(self.fields.get(name))
        if found not in allowed:
            self.refuse(name, f"is {found!r}; give one of {', '.join(allowed)}")
        return allowed.index(found)

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raises for a field."""
        raise ValueError(f"{self.place}: field {name} {problem}")

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{self.place} has no field {name}; add it, or remove the entry")
        return self.fields[name]


def read_jsonl(path: Path, wanted: str = "an object") -> list[Record]:
    """Reads a file with one JSON object on each line; blank lines are passed over."""
    # Not splitlines, which also parts at characters that may stand in a JSON string.
    lines = enumerate(read_text_file(path, "JSONL").split("\n"), start=1)
    return [
        Record.parse(line, f"line {number} of '{path}'", wanted)
        for number, line in lines
        if line.strip()
    ]


def check_settings(saved: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Refuses to resume with other settings; names the first that differs."""
    wanted = json.loads(json.dumps(dict(wanted)))
    for name in {**wanted, **saved}:
        if saved.get(name) != wanted.get(name):
            then, now = (
                "unset" if values.get(name) is None else values[name] for values in (saved, wanted)
            )
            differs = f"{where} was begun with {name} {then}, not {now}"
            raise ValueError(f"{differs}; go on as it was, or choose another file")


class ResultFile:
    """Results in JSON lines; what `append` was given is on the disk when it returns.

    Subclasses say in `take` what they remember of a record; it is called for each record that the
    file holds when it is opened, and for each that is appended. A last line that a kill has torn
    is dropped, a second writer is refused, and so is a file of something else.
    """

    def __init__(
        self, path: Path, kind: str, version: int = 1, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.kind = kind
        self.settings_path = path.with_name(f"{path.name}.job.json")
        self._header = _line({"kind": kind, "version": version}) if settings is None else b""
        with self._naming(), ExitStack() as cleanup:
            self._file = cleanup.enter_context(path.open("ab", buffering=0))
            self._lock()
            self._size = self._read()
            self._file.truncate(self._size)
            if settings is not None:
                self._settle(settings)
            elif not self._size:
                self._write(self._header)
            cleanup.pop_all()  # the file stays open unless something went wrong

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; its records are there already."""
        self._file.close()

    def take(self, record: Record) -> None:
        """Remembers what is needed of a record; refuses one that the file cannot have."""

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds records, all of them; if that fails, the file is as it was before."""
        added = [dict(record) for record in records]
        with self._naming():
            self._write(b"".join(map(_line, added)))
        for record in added:
            self.take(Record(record, f"a new line of '{self.path}'"))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(self._size)
            raise
        self._size += len(data)

    def _read(self) -> int:
        """Takes the records that are there; returns the length of what is complete."""
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"line {number} of '{self.path}'"
                foreign = ValueError(f"{place} is not a result of {self.kind}; choose another file")
                if not line.endswith(b"\n"):
                    # An unfinished first line is cut off only if it is ours.
                    is_begun = not self._header and self.settings_path.exists()
                    if size or is_begun or self._header.startswith(line):
                        break
                    raise foreign
                if number > 1 or not self._header:
                    self.take(Record.parse(line, place, f"a result of {self.kind}"))
                elif line != self._header:
                    raise foreign
                size += len(line)
        return size

    def _settle(self, settings: Mapping[str, Any]) -> None:
        """Writes the settings before the first result, or compares them."""
        if not self._size:
            write_json(self.settings_path, dict(settings))
            return
        beside = f"'{self.settings_path.name}' beside it, which says what made them"
        problem = f"'{self.path}' has results, but {beside}, cannot be read"
        with refusing(problem, "choose another file", OSError, ValueError, TypeError):
            saved = dict(parse_json(self.settings_path.read_text(encoding="utf-8")))
        check_settings(saved, settings, f"'{self.path}'")

    def _lock(self) -> None:
        """Keeps a second writer away as long as the file is open."""
        try:
            import fcntl
        except ImportError:  # a system without it
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            other = f"'{self.path}' is being written by another run"
            raise ValueError(f"{other}; wait for it, or choose another file") from error

    def _naming(self) -> AbstractContextManager[None]:
        remedy = "what it holds is kept, and the same command goes on from there when there is room"
        return naming(self.path, "written", f"{remedy}, or choose another place")


def _line(record: Mapping[str, Any]) -> bytes:
    # A lone half of a surrogate pair, which a model's bytes may decode to, is no UTF-8.
    return f"{json.dumps(record, ensure_ascii=False)}\n".encode(errors="replace")


def write_csv(path: Path, rows: Iterable[Row], columns: Sequence[str] | None = None) -> None:
    """Writes a table, whole or not at all."""
    rows = list(rows)
    columns = _columns(rows) if columns is None else columns
    with atomic_write(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([csv_cell(row.get(name)) for name in columns] for row in rows)


def read_csv(
    path: Path, columns: Sequence[str] | None = None, text: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Reads a table back: numbers as numbers, empty cells as ``None``."""
    with naming(path, "read", "give a CSV file"):
        data = path.read_bytes()
    problem = f"'{path}' is not the table it should be"
    with refusing(problem, "choose another file", ValueError, csv.Error):
        reader = csv.DictReader(io.StringIO(data.decode("utf-8"), newline=""))
        if columns is not None and list(reader.fieldnames or ()) != list(columns):
            raise ValueError(f"its first line is not {','.join(columns)}")
        return [
            {name: value if name in text else _number(value) for name, value in row.items()}
            for row in reader
        ]


class CsvFile:
    """A CSV file whose rows are with the operating system as soon as they are added."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)
        with naming(path, "written", "choose another place"):
            data = path.read_bytes() if path.exists() else b""
            first = data.partition(b"\n")[0].decode("utf-8", errors="replace")
            if data and next(csv.reader([first]), []) != self.columns:
                raise ValueError(
                    f"'{path}' holds other columns than {','.join(columns)[:60]}...; choose"
                    " another file, or move it away"
                )
            self._file = path.open("a", newline="", encoding="utf-8")
            self._file.truncate(data.rfind(b"\n") + 1)  # a kill may have torn the last row
        if b"\n" not in data:
            self._write(self.columns)

    def append(self, row: Row) -> None:
        """Adds a row."""
        self._write([csv_cell(row.get(name)) for name in self.columns])

    def _write(self, cells: Sequence[str]) -> None:
        with naming(self.path, "written", "choose another place"):
            csv.writer(self._file, lineterminator="\n").writerow(cells)
            self._file.flush()

    def close(self) -> None:
        """Closes the file; its rows are there already."""
        self._file.close()


def csv_cell(value: Any) -> str:
    """A value as a cell holds it: numbers to six digits, whole ones without a point."""
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
    """All columns; one that only later rows have stands where these have it."""
    columns: list[str] = []
    for row in rows:
        place = 0
        for name in row:
            if name not in columns:
                columns.insert(place, name)
            place = columns.index(name) + 1
    return columns


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Makes a Markdown table; columns of figures are set to the right."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    bars = "|".join("---:" if _is_figures(cells, n) else "---" for n in range(len(header)))
    first, *others = [f"| {' | '.join(row)} |\n" for row in (header, *cells)]
    return "".join([first, f"|{bars}|\n", *others])


def _is_figures(cells: Sequence[Sequence[str]], column: int) -> bool:
    found = [row[column] for row in cells if row[column]]
    return bool(found) and all(text.lstrip("-")[:1].isdigit() for text in found)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return csv_cell(value).replace("|", "\\|")
