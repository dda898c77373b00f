"""Tool calls in a model's text, found the same way however the text is cut into pieces."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from h2okv.engine.detokenizer import partial_length
from h2okv.engine.structured import fits
from h2okv.prompts.messages import parse_object

OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
MARKERS = (OPEN, CLOSE, PYTHON_TAG)
_STARTS = (OPEN, PYTHON_TAG)
_FENCES = ("```json", "```tool_call", "```")
_FENCE = "```"
_FIRST_KEYS = ("name", "arguments", "parameters", "type", "id")
_HEADS = tuple(f'{opening}"{key}"' for opening in ("{", "[{") for key in _FIRST_KEYS)
"""What calls without a marker begin with, without whitespace."""
_HEAD_LENGTH = 64
_MARKER_LENGTH = len("<tool_")
"""Characters of a marker that no other text begins with."""
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'["\\]')
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name, and its arguments as JSON in a string."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


Segment = str | ToolCall
"""A piece of text, or a call."""


class _Wait(Exception):  # noqa: N818
    """The next characters decide."""


class _JsonScan:
    """Finds the end of a JSON object or array, going on where the text ended before."""

    def __init__(self, start: int) -> None:
        self.start = self._at = start
        self._depth, self._in_string = 0, False

    def end(self, text: str) -> int | None:
        """Return the index after the value; ``None`` if the text ends before."""
        while match := (_STRING if self._in_string else _STRUCTURE).search(text, self._at):
            mark, self._at = match[0], match.end()
            if mark == "\\":
                if self._at == len(text):  # the escaped character is yet to come
                    self._at = match.start()
                    return None
                self._at += 1
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return self._at
        self._at = len(text)
        return None


class ToolCallParser:
    """Splits the text of an answer into text and tool calls.

    Calls are read between ``<tool_call>`` tags (Hermes, Qwen) anywhere, and as JSON objects or
    arrays with ``name`` and ``arguments`` or ``parameters`` (Llama 3) after ``<|python_tag|>``, and
    without it at the beginning of the answer, in a code fence too. What is no such call stays text,
    and a name that no tool has is a call, as in vLLM. After a marker a name alone is a call without
    arguments. Whitespace around calls is left out.

    Args:
        names: Functions that the answer may call.
        no_arguments: Those of them that need no arguments: their names alone are calls.
        has_schema: Whether the answer may also be JSON of a schema, which is no call, whatever its
            keys, unless it names a function.
        only_calls: Whether the answer has nothing but calls.
        strict: Schemas by the names of functions whose arguments must fit them. A grammar binds
            usual calls only; what does not fit, in whatever form, is no call.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        no_arguments: Collection[str] = (),
        has_schema: bool = False,
        only_calls: bool = False,
        strict: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._names, self._has_schema, self._only_calls = names, has_schema, only_calls
        self._strict = strict or {}
        self._no_arguments = () if has_schema else no_arguments
        self._text = ""  # not yet decided
        self._blank = ""  # whitespace that a call may follow
        self._has_text = self._has_calls = False
        self._may_begin = True  # whether a call without a marker may begin here
        self._is_closing = False  # whether a call's closing tag may come
        self._is_cut = self._is_call_cut = False
        self._fenced = False
        self._scan: _JsonScan | None = None

    def add(self, piece: str) -> list[Segment]:
        """Take the next piece; return the segments that are final now."""
        self._text += piece
        return list(self._segments(is_end=False))

    def end(self, is_cut: bool = False) -> list[Segment]:
        """Return the remaining segments; without a call that has only begun if the text is cut."""
        self._is_cut = is_cut
        segments = list(self._segments(is_end=True))
        if self._blank and not (self._has_calls or self._is_call_cut):
            segments.append(self._blank)
        return segments

    def _segments(self, is_end: bool) -> Iterator[Segment]:
        try:
            while self._text:
                if self._may_begin:
                    yield from self._begin(is_end)
                else:
                    yield from self._pass_text(is_end)
        except _Wait:
            return

    def _begin(self, is_end: bool) -> Iterator[Segment]:
        """Read the calls at the start of the text, if it starts with some."""
        at = self._skip(0)
        if self._is_closing:
            closing = _FENCE if self._fenced else CLOSE
            if self._is_cut and at < len(self._text) and closing.startswith(self._text[at:]):
                self._text = ""
                return
            if self._starts(closing, at, is_end):
                self._text, self._is_closing = self._text[at + len(closing) :], False
                return
        if self._has_calls and self._text[at : at + 1] in (";", ","):
            at = self._skip(at + 1)
        self._need(at, is_end)
        opening = next((tag for tag in _STARTS if self._starts(tag, at, is_end)), "")
        fence = ""
        if not opening and (self._fenced or not self._has_calls):
            fence = next((tag for tag in _FENCES if self._starts(tag, at, is_end)), "")
        value_at = self._skip(at + len(opening or fence))
        if self._is_begun_call(value_at, bool(opening)):
            self._text, self._is_call_cut = "", True
            return
        calls, end = self._read_calls(value_at, bool(opening), is_end)
        self._scan = None
        if calls:
            self._text = self._text[end:]
            self._has_calls = self._is_closing = True
            if opening or fence:
                self._fenced = bool(fence)
            yield from calls
        elif opening:  # no call: the marker is text, and what follows is read again
            yield from self._emit(self._text[: at + len(opening)])
            self._text, self._may_begin = self._text[at + len(opening) :], False
        else:
            self._may_begin = False

    def _read_calls(self, at: int, is_marked: bool, is_end: bool) -> tuple[list[ToolCall], int]:
        """Return the calls of the JSON value at an index, and its end; none if it has none."""
        self._need(at, is_end)
        if self._text[at : at + 1] not in ("{", "["):
            return [], at
        if not is_marked:
            # Other JSON is passed on at once.
            head = "".join(self._text[at : at + _HEAD_LENGTH].split())
            if not any(head.startswith(opening) or opening.startswith(head) for opening in _HEADS):
                return [], at
        if self._scan is None or self._scan.start != at:
            self._scan = _JsonScan(at)
        end = self._scan.end(self._text)
        if end is None:
            if not is_end:
                raise _Wait
            return [], at
        return self._calls(self._text[at:end], is_marked), end

    def _is_begun_call(self, at: int, is_marked: bool) -> bool:
        """Return whether a text that is cut ends in a call, whose JSON begins at an index."""
        value, is_bound = self._text[at:], is_marked or self._only_calls
        if not self._is_cut:
            return False
        if value[:1] not in ("{", "["):
            return self._only_calls or (is_marked and not value)
        names = (json.dumps(name, ensure_ascii=False) for name in self._names)
        is_named = '"name"' in value and any(name in value for name in names)
        return _JsonScan(at).end(self._text) is None and (
            is_bound or (is_named and not self._has_schema)
        )

    def _calls(self, source: str, is_marked: bool) -> list[ToolCall]:
        """Return the calls of a JSON object or an array of them; none if any is not a call."""
        value = parse_object(f'{{"calls": {source}}}', strict=False)
        if value is None:
            return []
        listed = value["calls"]
        listed = listed if isinstance(listed, list) else [listed]
        calls = [self._call(entry, is_marked) for entry in listed]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call(self, entry: Any, is_marked: bool) -> ToolCall | None:
        if not isinstance(entry, dict):
            return None
        inner = entry.get("function")
        if is_marked and isinstance(inner, dict) and "name" not in entry:
            entry = inner  # as in OpenAI's messages
        name = entry.get("name")
        if not isinstance(name, str) or not name or not _is_writable(name):
            return None
        if self._has_schema and not is_marked and name not in self._names:
            return None
        arguments = entry.get("arguments", entry.get("parameters"))
        if arguments in (None, "") and (is_marked or name in self._no_arguments):
            arguments = {}
        if isinstance(arguments, str):  # JSON in a string, as in OpenAI's messages
            arguments = parse_object(arguments, strict=False)
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        if not _is_writable(text):  # half of a surrogate pair
            text = json.dumps(arguments)
        if name in self._strict and not fits(self._strict[name], text):
            return None
        return ToolCall(name, text)

    def _pass_text(self, is_end: bool) -> Iterator[Segment]:
        """Pass text on up to the next marker."""
        starts = [index for tag in _STARTS if (index := self._text.find(tag)) >= 0]
        if starts:
            length, self._may_begin = min(starts), True
            self._is_closing = False
        else:
            length, partial = len(self._text), partial_length(self._text, _STARTS)
            if not is_end:
                length -= partial
            elif self._is_cut and partial >= _MARKER_LENGTH:
                self._text, length = self._text[:-partial], length - partial
                self._is_call_cut = True
        passed, self._text = self._text[:length], self._text[length:]
        yield from self._emit(passed)
        if not starts and self._text:
            raise _Wait

    def _emit(self, text: str) -> Iterator[str]:
        body = text.rstrip(_BLANK)
        if body:
            if self._has_calls and not self._has_text:
                self._blank, body = "", body.lstrip(_BLANK)
            yield self._blank + body
            self._has_text, self._blank = True, ""
        self._blank += text[len(text.rstrip(_BLANK)) :]

    def _skip(self, at: int) -> int:
        while self._text[at : at + 1] and self._text[at] in _BLANK:
            at += 1
        return at

    def _need(self, at: int, is_end: bool) -> None:
        """Wait for a character at an index."""
        if at >= len(self._text) and not is_end:
            raise _Wait

    def _starts(self, tag: str, at: int, is_end: bool) -> bool:
        """Return whether a tag stands at an index; wait if only its beginning is there."""
        candidate = self._text[at : at + len(tag)]
        if candidate != tag and tag.startswith(candidate) and not is_end:
            raise _Wait
        return candidate == tag


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
