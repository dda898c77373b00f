"""A JSONL file that a user gives: one JSON object on each line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.evaluation.text_file import read_text_file


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
        """Takes a field that holds a text.

        Raises:
            ValueError: If it is missing, no text, or empty; naming file, line and field.
        """
        return checked_text(self._field(name), f"{self.where}: field {name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """Takes a field that holds a text or a list of texts.

        Raises:
            ValueError: If there is none, or one of them is no text or empty.
        """
        found = self._field(name)
        entries = found if isinstance(found, list) else [found]
        if not entries:
            raise ValueError(f"{self.where}: field {name} is an empty list; give at least one text")
        where = f"{self.where}: field {name}"
        return tuple(checked_text(entry, where) for entry in entries)

    def number(self, name: str, default: int) -> int:
        """Takes a field that holds a whole number of 1 or more, if it is there.

        Raises:
            ValueError: If it holds something else.
        """
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
    """Reads all lines; blank ones are passed over.

    Args:
        path: The file.
        wanted: What a line should be, for the message.

    Returns:
        The lines in their order.

    Raises:
        ValueError: If the file cannot be read or is empty, or a line is no JSON object.
    """
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
    """Makes sure that a value is a text with something in it.

    Args:
        entry: Any JSON value.
        where: What it is, for the message.

    Returns:
        The text.

    Raises:
        ValueError: If it is no text, empty, or cannot be encoded.
    """
    if not isinstance(entry, str) or not entry.strip():
        raise ValueError(f"{where} is not a text; give a string that is not empty")
    try:
        entry.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair; correct the text") from error
    return entry
