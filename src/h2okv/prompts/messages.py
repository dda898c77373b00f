"""Parse chat messages of clients, for the server, batch jobs and `LLM.chat` alike."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from h2okv.records import short_repr

Message = dict[str, Any]
"""A message for chat templates: ``role``, ``content`` and further fields of the template."""

EMPTY: tuple[Any, ...] = (None, [], {}, "")
"""Values that mean the same as leaving a field out."""

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip
_TEMPLATE_FIELDS = ("name", "reasoning", "reasoning_content", "tool_call_id")
_IGNORED_FIELDS = frozenset(
    {"annotations", "cache_control", "created_at", "id", "metadata", "phase", "prefix",
     "provider_specific_fields", "reasoning_details", "status", "thinking_blocks", "timestamp",
     "type"}
)  # fmt: skip
"""Fields of a message that answers of other servers have, or hints to them."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking", "redacted_thinking")
_IGNORED_PART_FIELDS = frozenset(
    {"annotations", "cache_control", "citations", "id", "logprobs", "prompt_cache_breakpoint",
     "signature"}
)  # fmt: skip
_CHATS_ONLY = (
    "tools are supported in the form of OpenAI's chats; give tool_calls of assistants, and messages"
    " of role tool"
)
_TEXT_ONLY = "only text is supported; leave it out"
_IMAGE_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
"""Types of image parts: of OpenAI's chats and responses, and of transformers with Pillow's images;
with the field of the image."""
_DATA_URL = "data:image/png;base64,DATA"
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
MAX_IMAGE_BYTES = 20 << 20
"""Bytes of an image's file."""
_EXAMPLE = '{"role": "user", "content": "..."}'
_CALL_EXAMPLE = '{"id": "...", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
_TOOL_EXAMPLE = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
_SIGNATURE = ("name", "description", "parameters")
"""Fields of a function that a model sees."""
_IGNORED_TOOL_FIELDS = frozenset(
    {"allowed_callers", "annotations", "cache_control", "defer_loading", "eager_input_streaming",
     "id", "input_examples", "metadata", "output_schema", "response", "return", "returns", "title",
     "type"}
)  # fmt: skip
"""Fields of a tool that say nothing about its arguments."""


class FieldError(ValueError):
    """An invalid field: its path, and the problem as ``name=value: reason``."""

    def __init__(self, path: Sequence[str | int], problem: str, code: str = "invalid_value"):
        self.path, self.problem, self.code = tuple(path), problem, code
        super().__init__(f"{self.name}{problem}")

    @property
    def name(self) -> str:
        """The field's path as in Python: ``messages[0].role``."""
        return format_path(self.path)

    def within(self, *path: str | int) -> FieldError:
        """Return the same error with the path of an enclosing object prepended."""
        return FieldError((*path, *self.path), self.problem, self.code)


def format_path(path: Sequence[str | int]) -> str:
    """Write a path as in Python, such as ``messages[0].role``."""
    return "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in path).lstrip(".")


@dataclass(eq=False)
class ImagePart:
    """An image of a message: a file's bytes, or an image of Pillow; and its field, for errors."""

    data: Any
    path: tuple[str | int, ...]
    shown: str

    def __str__(self) -> str:
        return self.shown


def read_messages(messages: Any) -> list[Message]:
    """Parse messages of OpenAI's chat completions, or input items of OpenAI's responses.

    Args:
        messages: A list of objects with ``role`` (system, developer, user, assistant, tool) and
            ``content``, a text, ``None`` or a list of parts, texts and a user's images; assistants
            may have ``tool_calls``. Hints that change no answer and separate reasoning items are
            dropped.

    Returns:
        Messages for chat templates, with a text as ``content``, or with images a list of parts.

    Raises:
        FieldError: If a message is invalid; its path has the index in the list.
    """
    if not isinstance(messages, (list, tuple)):
        raise FieldError((), f"={short_repr(messages)} does not fit; give a list of {_EXAMPLE}")
    turns = []
    for at, item in enumerate(messages):
        if not (isinstance(item, Mapping) and item.get("type") == "reasoning"):
            turns.append(_read_message(item, at))
    if not turns:
        raise FieldError((), " is empty; give at least one message")
    return turns


def _read_message(message: Any, at: int) -> Message:
    if not isinstance(message, Mapping):
        raise FieldError((at,), f"={short_repr(message)} is not a message; give {_EXAMPLE}")
    kind = message.get("type") or "message"
    is_message = "role" in message and kind in _TEXT_PARTS  # some clients write that of the content
    if kind != "message" and not is_message:
        if kind == "item_reference":
            problem = ": item of type 'item_reference'; nothing is stored, so give the item itself"
            raise FieldError((at,), problem)
        if not isinstance(kind, str) or "call" in kind or "tool" in kind or "mcp" in kind:
            raise FieldError((at,), f": item of type {short_repr(kind)}; {_CHATS_ONLY}")
        supported = "only messages, calls of functions and their results are supported"
        raise FieldError((at,), f": item of type {short_repr(kind)}; {supported}")
    role = message.get("role")
    if role == "function" or message.get("function_call") not in EMPTY:
        name = "role" if role == "function" else "function_call"
        raise FieldError((at, name), f"={short_repr(message[name])}: {_CHATS_ONLY}")
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if message.get(name) not in EMPTY and role != owner:
            problem = f" is for messages of role {owner}, got role={short_repr(role)}; leave it out"
            raise FieldError((at, name), problem)
    if role is None:
        raise FieldError((at, "role"), " is missing; give it", "missing_field")
    if not isinstance(role, str) or role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise FieldError((at, "role"), f"={short_repr(role)} does not fit; give one of {roles}")
    if "content" not in message and role != "assistant":
        raise FieldError((at, "content"), " is missing; give it", "missing_field")
    turn = {"role": _ROLES[role], "content": _read_content(message, at)}
    turn |= _read_template_fields(message, at)
    if (calls := message.get("tool_calls")) not in EMPTY:
        turn["tool_calls"] = _read_tool_calls(calls, (at, "tool_calls"))
    return turn


def _read_tool_calls(calls: Any, path: tuple[str | int, ...]) -> list[dict[str, Any]]:
    """Read the calls of an earlier answer, with arguments as objects, as templates take them."""
    if not isinstance(calls, (list, tuple)):
        raise FieldError(path, f"={short_repr(calls)} does not fit; give a list of tool calls")
    read = []
    for number, call in enumerate(calls):
        at: tuple[str | int, ...] = (*path, number)
        function = _read_function(call, at, _CALL_EXAMPLE)
        name = _read_name(function, at)
        arguments: Any = function.get("arguments")
        if not isinstance(arguments, (str, Mapping)) and arguments is not None:
            problem = f"={short_repr(arguments)} does not fit; give JSON in a string"
            raise FieldError((*at, "function", "arguments"), problem)
        if isinstance(arguments, str):
            # What is no JSON object stays a text: the model wrote it, and may see it again.
            parsed = parse_object(arguments)
            arguments = arguments if arguments and parsed is None else parsed
        arguments = {} if arguments is None else arguments
        _check_writable(arguments, (*at, "function", "arguments"))
        identifier = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        called = {"name": name, "arguments": arguments}
        read.append({**identifier, "type": "function", "function": called})
    return read


def _read_function(entry: Any, path: tuple[str | int, ...], example: str) -> Mapping[str, Any]:
    """Return the function of a tool or of a call; no other type is known."""
    if not isinstance(entry, Mapping):
        raise FieldError(path, f"={short_repr(entry)} does not fit; give such as {example}")
    if (kind := entry.get("type") or "function") != "function":
        problem = f"={short_repr(kind)} is not supported; give a function"
        raise FieldError((*path, "type"), problem)
    function = entry.get("function")
    if not isinstance(function, Mapping):
        problem = "is missing" if function is None else f"={short_repr(function)} does not fit"
        problem = problem if problem.startswith("=") else f" {problem}"
        raise FieldError((*path, "function"), f"{problem}; give such as {example}")
    return function


def _read_name(function: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        problem = f"={short_repr(name)} does not fit; give a non-empty string"
        raise FieldError((*path, "function", "name"), problem)
    return _checked_text(name, (*path, "function", "name"))


def parse_object(text: str, strict: bool = True) -> dict[str, Any] | None:
    """Return a JSON object, or ``None`` for any other text.

    Unless ``strict``, strings may have line breaks as they are, as models write them.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, strict=strict)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _no_constant(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_writable(value: Any, path: Sequence[str | int]) -> None:
    """Refuse a JSON value that a template could not write."""
    try:
        _checked_text(json.dumps(value, ensure_ascii=False, allow_nan=False), path)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError(path, f"={short_repr(value)} is not JSON; correct it") from error


def read_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read a request's ``tools``; none with ``tool_choice="none"``, which lets it call none.

    Returns:
        Tools as chat templates take them, without hints that are not for the model.

    Raises:
        FieldError: If one of them is not a function, or not well formed.
    """
    tools = fields.get("tools")
    if tools in EMPTY:
        return []
    if not isinstance(tools, (list, tuple)):
        raise FieldError(("tools",), f"={short_repr(tools)} does not fit; give a list of functions")
    read: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        at = ("tools", number)
        function = _read_function(tool, at, _TOOL_EXAMPLE)
        _read_name(function, at)
        for fields_of, path in ((tool, at), (function, (*at, "function"))):
            for name, value in fields_of.items():
                names = ("function",) if fields_of is tool else (*_SIGNATURE, "strict")
                if name not in (*names, *_IGNORED_TOOL_FIELDS) and value not in EMPTY:
                    problem = f" is not known; give {', '.join(names)}, or leave it out"
                    raise FieldError((*path, name), problem, "unknown_field")
        for name, kind, remedy in (
            ("description", str, "give a text"),
            ("parameters", Mapping, "give a JSON schema"),
            ("strict", bool, "give true or false"),
        ):
            value = function.get(name)
            if value is not None and not isinstance(value, kind):
                problem = f"={short_repr(value)} does not fit; {remedy}"
                raise FieldError((*at, "function", name), problem)
        signature = {name: function[name] for name in _SIGNATURE if function.get(name) is not None}
        _check_writable(signature, at)
        read.append({"type": "function", "function": signature})
    return [] if fields.get("tool_choice") == "none" else read


def _read_template_fields(message: Mapping[str, Any], at: int) -> Message:
    """Read the fields that only some templates use; refuse those that need more than text."""
    turn: Message = {}
    for name, value in message.items():
        if value in EMPTY or name in ("role", "content", "refusal", "tool_calls", *_IGNORED_FIELDS):
            continue
        if name in _TEMPLATE_FIELDS:
            if isinstance(value, str):
                turn[name] = _checked_text(value, (at, name))
            elif name in ("name", "tool_call_id"):
                problem = f"={short_repr(value)} does not fit; give a valid string"
                raise FieldError((at, name), problem)
        elif name in ("audio", "images"):
            raise FieldError((at, name), f"={short_repr(value)}: {_TEXT_ONLY}")
        else:
            raise FieldError((at, name), " is not known; leave it out", "unknown_field")
    return turn


def _read_content(message: Mapping[str, Any], at: int) -> str | list[dict[str, Any]]:
    # A refusal of the assistant is in a separate field.
    content = message.get("content") or message.get("refusal") or ""
    path: tuple[str | int, ...] = (at, "content")
    if isinstance(content, str):
        return _checked_text(content, path)
    if not isinstance(content, (list, tuple)):
        such = "give a text, or a list of parts such as {'type': 'text', 'text': '...'}"
        raise FieldError(path, f"={short_repr(content)} does not fit; {such}")
    pieces: list[dict[str, Any]] = []
    for number, item in enumerate(content):
        kind = item.get("type") if isinstance(item, Mapping) else None
        if isinstance(kind, str) and kind in _IMAGE_PARTS:
            if message.get("role") != "user":
                problem = f" is for messages of role user, got role={short_repr(message['role'])}"
                raise FieldError((*path, number), f"{problem}; leave it out")
            pieces.append({"type": "image", "image": _read_image(item, (*path, number))})
        else:
            pieces.append({"type": "text", "text": _read_part(item, (*path, number))})
    if any(item["type"] == "image" for item in pieces):
        return [item for item in pieces if item.get("text") != ""]
    return "".join(item["text"] for item in pieces)


def _read_image(content: Mapping[str, Any], path: tuple[str | int, ...]) -> ImagePart:
    """Read an image part, whose image is opened only where the model can read one."""
    kind = content["type"]
    name = _IMAGE_PARTS[kind]
    for other, value in content.items():
        if other in ("type", name, "detail", *_IGNORED_PART_FIELDS) or value in EMPTY:
            continue
        raise FieldError((*path, other), f"={short_repr(value)} is not supported; leave it out")
    path, value = (*path, name), content.get(name)
    if kind == "image":
        if not type(value).__module__.startswith("PIL."):
            problem = f"={short_repr(value)} does not fit; give an image of Pillow, or an image_url"
            raise FieldError(path, f"{problem} with {_DATA_URL}")
        return ImagePart(value, path, short_repr(value))
    if isinstance(value, Mapping):
        path, value = (*path, "url"), value.get("url")
    if value is None:
        raise FieldError(path, f" is missing; give {_DATA_URL}", "missing_field")
    shown = short_repr(value)
    if not isinstance(value, str) or value[:5].lower() != "data:":
        problem = f"={shown} is not a data URL, and nothing is fetched; give {_DATA_URL}"
        raise FieldError(path, problem)
    head, _, encoded = value.partition(",")
    media_type, _, encoding = head[5:].lower().partition(";")
    if media_type not in _IMAGE_TYPES or encoding.rpartition(";")[2] != "base64":
        kinds = ", ".join(name.removeprefix("image/").upper() for name in _IMAGE_TYPES)
        problem = f"={shown} is not an image in base64 ({kinds}); give {_DATA_URL}"
        raise FieldError(path, problem)
    if len(encoded) * 3 // 4 > MAX_IMAGE_BYTES:
        size, limit = len(encoded) * 3 // 4, MAX_IMAGE_BYTES
        problem = f"={shown} has {size:,} bytes, and {limit:,} are allowed; give a smaller image"
        raise FieldError(path, problem)
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FieldError(path, f"={shown} is not base64 ({error}); give {_DATA_URL}") from error
    return ImagePart(data, path, shown)


def _read_part(content: Any, path: tuple[str | int, ...]) -> str:
    if isinstance(content, str):
        return _checked_text(content, path)
    kind = content.get("type") if isinstance(content, Mapping) else None
    if kind in _REASONING_PARTS:
        return ""
    if kind in ("tool_use", "tool_result", "tool_call"):
        raise FieldError(path[:-1], f": part of type {short_repr(kind)}; {_CHATS_ONLY}")
    if kind not in (*_TEXT_PARTS, "refusal"):
        such = "only text and images are supported, so give parts such as"
        such += " {'type': 'text', 'text': '...'}"
        raise FieldError(path[:-1], f": part of type {short_repr(kind)}; {such}")
    name = "refusal" if kind == "refusal" else "text"
    for other, value in content.items():
        if other not in ("type", name, *_IGNORED_PART_FIELDS) and value not in EMPTY:
            raise FieldError((*path, other), " is not known; leave it out", "unknown_field")
    text, path = content.get(name), (*path, name)
    if not isinstance(text, str):
        raise FieldError(path, f"={short_repr(text)} does not fit; give a text")
    return _checked_text(text, path)


def _checked_text(text: str, path: Sequence[str | int]) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FieldError(path, " has half of a surrogate pair; correct the text") from error
    return text


@dataclass(frozen=True)
class Conversation:
    """Parsed messages, and how a chat template is applied to them.

    A final assistant message is continued, unless one of the two switches says otherwise; both are
    those of `apply_chat_template` and of vLLM's requests.

    Attributes:
        messages: The result of `read_messages`.
        add_generation_prompt: Whether the text ends with the header of a new assistant message;
            ``None``: if the final message is not continued.
        continue_final_message: Whether the text ends within the final message; ``None``: if that is
            an assistant's and ``add_generation_prompt`` is not true.
        template_kwargs: Further variables of the template.
        tools: Functions that the model may call, as `read_tools` returns them.

    Raises:
        FieldError: If the switches contradict each other, or a switch is not a bool.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                problem = f"={short_repr(value)} does not fit; give true or false"
                raise FieldError((name,), problem)
        if self.add_generation_prompt and self.continue_final_message:
            raise FieldError(
                ("continue_final_message",),
                "=true contradicts add_generation_prompt=true; give one of them",
            )
        if self.continue_final_message and self._ends_in_calls:
            raise FieldError(
                ("continue_final_message",),
                "=true cannot continue a message with tool_calls; give the tools' results",
            )

    @property
    def images(self) -> list[ImagePart]:
        """The images of all messages, in their order."""
        return [
            item["image"]
            for message in self.messages
            if isinstance(message["content"], list)
            for item in message["content"]
            if item["type"] == "image"
        ]

    @property
    def _ends_in_calls(self) -> bool:
        return bool(self.messages) and "tool_calls" in self.messages[-1]

    @property
    def continues(self) -> bool:
        """Whether the answer goes on within the final message."""
        if self.continue_final_message is None:
            is_answer = self.messages[-1]["role"] == "assistant" and not self._ends_in_calls
            return is_answer and not self.add_generation_prompt
        return self.continue_final_message

    @property
    def begins_answer(self) -> bool:
        """Whether the header of a new assistant message follows."""
        return not self.continues and self.add_generation_prompt is not False


_RESERVED = frozenset(
    {"chat_template", "continue_final_message", "conversation", "max_length", "padding",
     "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
     "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)  # fmt: skip
"""Arguments of `apply_chat_template` that are not variables of a template."""


def read_conversation(fields: Mapping[str, Any], name: str = "messages") -> Conversation:
    """Parse a request's messages with the fields that control their rendering.

    Args:
        fields: A request, of which ``add_generation_prompt``, ``continue_final_message``,
            ``chat_template_kwargs``, ``reasoning_effort``, ``tools`` and ``tool_choice`` are read
            as well.
        name: The field with the messages.

    Raises:
        FieldError: If a field is invalid.
    """
    try:
        messages = read_messages(fields[name])
    except FieldError as error:
        raise error.within(name) from error
    for item in Conversation(messages).images:
        item.path = (name, *item.path)
    field_name = "chat_template_kwargs"
    variables = fields.get(field_name) or {}
    if not isinstance(variables, Mapping) or not all(isinstance(key, str) for key in variables):
        raise FieldError((field_name,), f"={short_repr(variables)} does not fit; give an object")
    variables = dict(variables)
    switches = {
        switch: variables.pop(switch, None) if fields.get(switch) is None else fields[switch]
        for switch in ("add_generation_prompt", "continue_final_message")
    }
    for variable in variables:
        if variable == "tools":
            problem = " is not a template's variable; give tools as a field of the request"
            raise FieldError((field_name, variable), problem)
        if variable in _RESERVED:
            raise FieldError((field_name, variable), " is not a template's variable; leave it out")
    if fields.get("reasoning_effort") is not None:
        variables.setdefault("reasoning_effort", fields["reasoning_effort"])
    tools = read_tools(fields)
    return Conversation(messages, **switches, template_kwargs=variables, tools=tools)
