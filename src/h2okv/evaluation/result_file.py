"""The file that gets every sample's result as it comes, so that a stopped run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

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

    Args:
        path: The file; made if it is not there.
        versions: The code that runs now, noted if it differs from what the file says last.

    Raises:
        ValueError: If it holds something else, another run has it open, or it cannot be read or
            written.
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
        """Begins a run, or goes on with it.

        Args:
            cell: Its name.
            identity: All that its results depend on; JSON values.

        Raises:
            ValueError: If the file has a run of this name that depends on something else.
        """
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
        """Tells which code computed a run's results.

        Returns:
            Versions by name; where parts of it were computed by several, all of them.
        """
        found = self._versions.get(cell) or [self._current]
        names = dict.fromkeys(name for one in found for name in one)
        return {name: " ".join(dict.fromkeys(one.get(name, "") for one in found)) for name in names}

    def add(self, cell: str, results: Mapping[int, Result]) -> None:
        """Appends results, all of them or, if the machine fails, some.

        Args:
            cell: The run, opened before.
            results: By sample; JSON values.

        Raises:
            ValueError: If the file cannot be written any more.
        """
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
