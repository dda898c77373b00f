"""Data files of several kinds, read record by record; a bad one is named by file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


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
        """Returns a field that must hold a text.

        Args:
            name: the field.

        Raises:
            ValueError: if it is missing, no text or empty.
        """
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            self.refuse(name, "is missing or has no text")
        return str(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> int:
        """Returns which of a few values a field has.

        Args:
            name: the field.
            allowed: the values.

        Returns:
            The index.

        Raises:
            ValueError: if it has none of them.
        """
        value = str(self.fields.get(name))
        if value not in allowed:
            self.refuse(name, f"is {value!r} and must be one of {', '.join(allowed)}")
        return allowed.index(value)

    def refuse(self, name: str, what: str) -> None:
        """Raises for a field.

        Args:
            name: the field.
            what: what is wrong with it.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.place}: field {name!r} {what}; repair the line or get the file again."
        )


def read_json_lines(path: Path) -> Iterator[Record]:
    """Reads a file with one JSON object on each line; empty lines are passed over.

    Args:
        path: the file.

    Yields:
        Its records.

    Raises:
        ValueError: if a line is no JSON object.
    """
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _object(f"{path}, line {number}", line)


def read_json_list(path: Path) -> Iterator[Record]:
    """Reads a file that is one JSON list of objects.

    Args:
        path: the file.

    Yields:
        Its records.

    Raises:
        ValueError: if it is something else.
    """
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


def read_table(path: Path) -> Iterator[Record]:
    """Reads a table with tabs between the columns and their names in the first line.

    Args:
        path: the file.

    Yields:
        Its records.
    """
    rows = csv.DictReader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    for row in rows:
        yield Record(f"{path}, line {rows.line_num}", dict(row))


def read_items(path: Path) -> Iterator[Record]:
    """Reads an XML file's ``item`` elements: attributes and the texts of its children.

    Args:
        path: the file.

    Yields:
        Its records.

    Raises:
        ValueError: if it is no XML.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError) as error:
        raise ValueError(
            f"{path} is no readable XML file ({error}); get the file again."
        ) from error
    for number, item in enumerate(root.iter("item"), start=1):
        fields = dict(item.attrib) | {child.tag: child.text for child in item}
        yield Record(f"{path}, item {item.get('id', number)}", fields)


def _object(place: str, line: str) -> Record:
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
