"""Conversations in a JSONL file, one for each line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.evaluation.jsonl_file import checked_text, read_objects

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
    what = "an object with turns or messages"
    found = [_conversation(line.fields, line.where) for line in read_objects(path, what)]
    if not found:
        raise ValueError(f"'{path}' has no conversations; give a JSONL file with one on each line")
    return found


def _conversation(fields: dict[str, Any], where: str) -> Conversation:
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
    return Message("user", checked_text(entry, where))


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object; give one with role and content")
    role = entry.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role is {role!r}; give one of {', '.join(_ROLES)}")
    return Message(role, checked_text(entry.get("content"), f"{where}.content"))


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
