"""Conversations in a JSONL file, one for each line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.evaluation.text_file import read_text_file

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        role: `system`, `user` or `assistant`.
        content: The text.
    """

    role: str
    content: str


Conversation = tuple[Message, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """Reads conversations.

    A line is a JSON object with the field ``turns``, a list of what the user says (MT-Bench), or
    ``messages``, a list of objects with ``role`` and ``content``. Other fields are passed over.

    Args:
        path: The JSONL file.

    Returns:
        The conversations in their order. The first message after an optional system message is
        the user's, and no two answers stand next to each other.

    Raises:
        ValueError: If the file cannot be read or is empty, or a line is not a conversation,
            naming the line and the field.
    """
    # Not splitlines, which also parts at characters that may stand in a JSON string.
    lines = read_text_file(path).split("\n")
    found = [
        _conversation(line, f"line {number} of '{path}'")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f"'{path}' has no conversations; give a JSONL file with one on each line")
    return found


def _conversation(line: str, where: str) -> Conversation:
    try:
        fields = json.loads(line)
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply; give a conversation") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); correct or remove it") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is not a JSON object; give an object with turns or messages")
    given = [name for name in ("turns", "messages") if name in fields]
    if len(given) != 1:
        what = "both turns and messages" if given else "neither turns nor messages"
        raise ValueError(f"{where} has {what}; give one of these fields")
    name = given[0]
    entries = fields[name]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: {name} is not a list with entries; give at least one")
    read = _turn if name == "turns" else _message
    messages = tuple(read(entry, f"{where}: {name}[{i}]") for i, entry in enumerate(entries))
    if name == "messages":
        _check_order(messages, where)
    return messages


def _turn(entry: Any, where: str) -> Message:
    return Message("user", _text(entry, where))


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object; give one with role and content")
    role = entry.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role is {role!r}; give one of {', '.join(_ROLES)}")
    return Message(role, _text(entry.get("content"), f"{where}.content"))


def _text(entry: Any, where: str) -> str:
    if not isinstance(entry, str) or not entry.strip():
        raise ValueError(f"{where} is not a text; give a string that is not empty")
    try:
        entry.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair; correct the text") from error
    return entry


def _check_order(messages: Conversation, where: str) -> None:
    before = "start"
    for i, message in enumerate(messages):
        if message.role == "system" and before != "start":
            raise ValueError(
                f"{where}: messages[{i}].role is 'system'; only the first message may be that"
            )
        if message.role == "assistant" and before != "user":
            raise ValueError(
                f"{where}: messages[{i}].role is 'assistant', but no message of the user stands"
                " before it; an answer needs a question"
            )
        before = message.role
    if before == "system":
        raise ValueError(f"{where}: messages has no message of the user; give at least one")
