"""Parse chat messages of clients, for the server, batch jobs and `LLM.chat` alike."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from h2okv.prompts import readers
from h2okv.prompts.readers import EMPTY, FieldError, Fields, Path, Reader
from h2okv.records import short_repr

Message = dict[str, Any]
"""A message for chat templates: ``role``, ``content`` and further fields of the template."""

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
    {"annotations", "cache_control", "citations", "detail", "id", "logprobs",
     "prompt_cache_breakpoint", "signature"}
)  # fmt: skip
_CHATS_ONLY = "calls are given as tool_calls, and results as messages of role tool; use these"
_TEXT_ONLY = "only text is supported; leave it out"
_DATA_URL = "data:image/png;base64,DATA"
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
MAX_IMAGE_BYTES = 20 << 20
"""Bytes of an image's file."""
_EXAMPLE = '{"role": "user", "content": "..."}'
_FUNCTION = '{"name": "f", ...}'
_IGNORED_TOOL_FIELDS = frozenset(
    {"allowed_callers", "annotations", "cache_control", "defer_loading", "eager_input_streaming",
     "id", "input_examples", "metadata", "output_schema", "response", "return", "returns", "title"}
)  # fmt: skip
"""Fields of a tool that say nothing about its arguments."""


@dataclass(eq=False)
class ImagePart:
    """An image of a message: a file's bytes, or an image of Pillow; and its field, for errors."""

    data: Any
    path: Path
    shown: str

    def __str__(self) -> str:
        return self.shown


def read_pillow(value: Any, path: Path) -> ImagePart:
    """Read an image of Pillow."""
    if not type(value).__module__.startswith("PIL."):
        raise readers.unlike(f"an image of Pillow, or image_url with {_DATA_URL}", value, path)
    return ImagePart(value, path, short_repr(value))


def _read_data_url(value: Any, path: Path) -> ImagePart:
    """Read the file in a data URL, which is opened only where the model reads images."""
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
    if (size := len(encoded) * 3 // 4) > MAX_IMAGE_BYTES:
        raise FieldError(path, f" must have at most {MAX_IMAGE_BYTES:,} bytes, got {size:,}")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FieldError(path, f"={shown} is not base64 ({error}); give {_DATA_URL}") from error
    return ImagePart(data, path, shown)


_URL = Fields({"url": _read_data_url}, {"url": _DATA_URL}, _IGNORED_PART_FIELDS)


def _read_image_url(value: Any, path: Path) -> ImagePart:
    is_object = isinstance(value, Mapping)
    image: ImagePart = _URL(value, path)["url"] if is_object else _read_data_url(value, path)
    return image


def _piece(kind: str, name: str, reader: Reader, such: str = "a text") -> Reader:
    """Return the reader of a part: a text or an image, in a field."""
    fields = Fields({name: reader}, {name: such}, _IGNORED_PART_FIELDS)
    return lambda value, path: {"type": kind, kind: fields(value, path)[name]}


_read_part = readers.by_type(
    {
        **dict.fromkeys(_TEXT_PARTS, _piece("text", "text", readers.text)),
        "refusal": _piece("text", "refusal", readers.text),
        **dict.fromkeys(_REASONING_PARTS, lambda value, path: {"type": "text", "text": ""}),
        # Of OpenAI's chats and responses, and of transformers with Pillow's images.
        "image_url": _piece("image", "image_url", _read_image_url, _DATA_URL),
        "input_image": _piece("image", "image_url", _read_image_url, _DATA_URL),
        "image": _piece("image", "image", read_pillow, "an image of Pillow"),
    }
)


def _read_content(content: Any, path: Path) -> str | list[dict[str, Any]]:
    """Return a text, or with images a list of parts."""
    if isinstance(content, str):
        return readers.text(content, path)
    if not isinstance(content, (list, tuple)):
        such = "a text, or a list of parts such as {'type': 'text', 'text': '...'}"
        raise readers.unlike(such, content, path)
    pieces = [
        _read_part({"type": "text", "text": item} if isinstance(item, str) else item, (*path, at))
        for at, item in enumerate(content)
    ]
    if any(item["type"] == "image" for item in pieces):
        return [item for item in pieces if item.get("text") != ""]
    return "".join(item["text"] for item in pieces)


def _read_arguments(arguments: Any, path: Path) -> Any:
    """Read the arguments of an earlier call as an object, as templates take them."""
    if not isinstance(arguments, (str, Mapping)):
        raise readers.unlike("JSON in a string", arguments, path)
    if isinstance(arguments, str):
        # What is no JSON object stays a text: the model wrote it, and may see it again.
        parsed = parse_object(arguments)
        arguments = arguments if arguments and parsed is None else parsed or {}
    _check_writable(arguments, path)
    return arguments


_NAMED = {"name": "that of a function"}
_CALLED: Mapping[str, Reader] = {"name": readers.name, "arguments": _read_arguments}
_CALL = Fields(
    {
        "id": readers.text_or_nothing,
        "type": readers.one_of("function"),
        "function": Fields(_CALLED, _NAMED, is_open=True),
    },
    {"function": _FUNCTION},
    is_open=True,
)
_CALL_ITEM = Fields({**_CALLED, "call_id": readers.text_or_nothing}, _NAMED, is_open=True)
_RESULT_ITEM = Fields({"output": _read_content, "call_id": readers.text}, is_open=True)
_MESSAGE = Fields(
    {
        "role": readers.one_of(*_ROLES),
        "content": _read_content,
        "refusal": readers.text,
        "tool_calls": readers.list_of(_CALL, "a list of tool calls"),
        "name": readers.text,
        "tool_call_id": readers.text,
        "reasoning": readers.text_or_nothing,
        "reasoning_content": readers.text_or_nothing,
    },
    {"role": f"one of {', '.join(_ROLES)}"},
    _IGNORED_FIELDS,
    {"audio": (_TEXT_ONLY,), "images": (_TEXT_ONLY,), "function_call": (_CHATS_ONLY,)},
)


def read_messages(messages: Any, path: Path = ()) -> list[Message]:
    """Parse messages of OpenAI's chat completions, or input items of its responses, for templates.

    They have ``role`` (system, developer, user, assistant, tool) and ``content``, a text, ``None``
    or a list of parts, texts and a user's images; assistants may have ``tool_calls``. Hints that
    change no answer and separate reasoning items are dropped.
    """
    if not isinstance(messages, (list, tuple)):
        raise readers.unlike(f"a list of {_EXAMPLE}", messages, path)
    turns: list[Message] = []
    for at, item in enumerate(messages):
        turn = _read_item(item, (*path, at))
        if turn is None:
            continue
        if item.get("type") == "function_call" and turns and turns[-1]["role"] == "assistant":
            calls = [*turns[-1].get("tool_calls", ()), *turn["tool_calls"]]
            turns[-1] = {**turns[-1], "tool_calls": calls}  # of the answer that it belongs to
        else:
            turns.append(turn)
    if not turns:
        raise FieldError(path, " is empty; give at least one message")
    return turns


def read_input(value: Any, path: Path) -> list[Message]:
    """Parse messages, or a user's text."""
    is_text = isinstance(value, str)
    return read_messages([{"role": "user", "content": value}] if is_text else value, path)


_find_item = readers.one_of("message", "function_call", "function_call_output", "reasoning")


def _read_item(item: Any, path: Path) -> Message | None:
    """Read a message, a call or its result; return ``None`` for reasoning."""
    if not isinstance(item, Mapping):
        raise readers.unlike(f"a message such as {_EXAMPLE}", item, path)
    kind = item.get("type") or "message"
    if kind in _TEXT_PARTS and "role" in item:  # some clients write the type of the content
        kind = "message"
    match _find_item(kind, (*path, "type")):
        case "reasoning":
            return None
        case "function_call":
            call = _CALL_ITEM(item, path)
            listed = [_make_call(call.get("call_id"), call)]
            return {"role": "assistant", "content": "", "tool_calls": listed}
        case "function_call_output":
            if "output" not in item:
                raise FieldError((*path, "output"), " is missing; give it", "missing_field")
            result = _RESULT_ITEM(item, path)
            identifier = {"tool_call_id": result["call_id"]} if result.get("call_id") else {}
            turn = {"role": "tool", "content": result.get("output", ""), **identifier}
        case _:
            turn = _read_message(item, path)
    if turn["role"] != "user" and isinstance(turn["content"], list):
        image = Conversation([turn]).images[0]
        problem = f" is for messages of role user, got role={turn['role']!r}; leave it out"
        raise FieldError(image.path, problem)
    return turn


def _read_message(message: Mapping[str, Any], path: Path) -> Message:
    role = message.get("role")
    for name, writer in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if message.get(name) not in EMPTY and role != writer:
            problem = (
                f" is for messages of role {writer}, got role={short_repr(role)}; leave it out"
            )
            raise FieldError((*path, name), problem)
    read = _MESSAGE(message, path)
    if "content" not in message and role != "assistant":
        raise FieldError((*path, "content"), " is missing; give it", "missing_field")
    # A refusal of the assistant is in a separate field.
    content = read.get("content") or read.get("refusal") or ""
    turn: Message = {"role": _ROLES[read["role"]], "content": content}
    turn |= {name: read[name] for name in _TEMPLATE_FIELDS if read.get(name)}
    if calls := read.get("tool_calls"):
        turn["tool_calls"] = [_make_call(call.get("id"), call["function"]) for call in calls]
    return turn


def _make_call(call_id: str | None, function: Mapping[str, Any]) -> dict[str, Any]:
    called = {"name": function["name"], "arguments": function.get("arguments", {})}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": called}


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


def _check_writable(value: Any, path: Path) -> None:
    """Refuse a JSON value that a template could not write."""
    try:
        readers.text(json.dumps(value, ensure_ascii=False, allow_nan=False), path)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError(path, f"={short_repr(value)} is not JSON; correct it") from error


read_schema = readers.instance("a JSON schema", Mapping)  # which is checked where it is enforced
_SIGNATURE: Mapping[str, Reader] = {
    "name": readers.name,
    "description": readers.text,
    "parameters": read_schema,
    "strict": readers.boolean,
}
_FUNCTION_TYPE: Mapping[str, Reader] = {"type": readers.one_of("function")}
_TOOL = Fields(
    {**_FUNCTION_TYPE, "function": Fields(_SIGNATURE, _NAMED, _IGNORED_TOOL_FIELDS)},
    {"function": _FUNCTION},
    _IGNORED_TOOL_FIELDS,
)
_FLAT_TOOL = Fields({**_FUNCTION_TYPE, **_SIGNATURE}, _NAMED, _IGNORED_TOOL_FIELDS)


def read_tool(tool: Any, path: Path) -> dict[str, Any]:
    """Read a function that may be called, of OpenAI's chats or responses, for chat templates."""
    function = _FLAT_TOOL(tool, path) if _is_flat(tool) else _TOOL(tool, path)["function"]
    names = (name for name in _SIGNATURE if name != "strict")
    seen = {name: function[name] for name in names if name in function}
    _check_writable(seen, path)
    return {"type": "function", "function": seen}


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and "name" in value and "function" not in value


_CHOICES = ("auto", "none", "required")
_CHOICE = Fields(
    {**_FUNCTION_TYPE, "function": Fields({"name": readers.text}, _NAMED)}, {"function": _FUNCTION}
)
_FLAT_CHOICE = Fields({**_FUNCTION_TYPE, "name": readers.text}, _NAMED)


def read_tool_choice(value: Any, path: Path) -> str | Mapping[str, str]:
    """Return ``"auto"``, ``"none"``, ``"required"``, or the function's ``{"name": ...}``."""
    if value in EMPTY:
        return "auto"
    if isinstance(value, Mapping):
        read = _FLAT_CHOICE(value, path) if _is_flat(value) else _CHOICE(value, path)["function"]
        return {"name": read["name"]}
    return str(readers.one_of(*_CHOICES, "a function's {'type': 'function', ...}")(value, path))


@dataclass(frozen=True)
class Conversation:
    """Parsed messages, and how a chat template is applied to them.

    A final assistant message is continued, unless one of the two switches says otherwise; both are
    those of `apply_chat_template` and of vLLM's requests, and may not contradict each other.
    """

    messages: Sequence[Mapping[str, Any]]  # as `read_messages` returns them
    add_generation_prompt: bool | None = None  # whether the text ends with a new answer's header
    continue_final_message: bool | None = None  # whether it ends within the final message
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables
    tools: Sequence[Mapping[str, Any]] = ()  # as `read_tool` returns them

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                readers.boolean(value, (name,))
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


def _read_variables(value: Any, path: Path) -> dict[str, Any]:
    """Read the variables of a template, which may be the switches of `Conversation` too."""
    variables = readers.mapping(value, path)
    for name in variables:
        if name in _RESERVED and name != "continue_final_message":
            remedy = "give tools as a field of the request" if name == "tools" else "leave it out"
            raise FieldError((*path, name), f" is not a template's variable; {remedy}")
    return variables


TEMPLATED: Mapping[str, Reader] = {
    "tools": readers.list_of(read_tool, "a list of functions"),
    "tool_choice": read_tool_choice,
    "add_generation_prompt": readers.any_value,
    "continue_final_message": readers.any_value,
    "chat_template_kwargs": _read_variables,
    "reasoning_effort": readers.text,  # a variable of some templates
}
"""Fields of a request that say how its messages are rendered."""


def make_conversation(messages: Sequence[Message], read: Mapping[str, Any]) -> Conversation:
    """Return the conversation of messages, and of fields that the readers of `TEMPLATED` read."""
    variables = dict(read.get("chat_template_kwargs") or {})
    switches = {
        name: variables.pop(name, None) if read.get(name) is None else read[name]
        for name in ("add_generation_prompt", "continue_final_message")
    }
    if (effort := read.get("reasoning_effort")) is not None:
        variables.setdefault("reasoning_effort", effort)
    tools = [] if read.get("tool_choice") == "none" else read.get("tools") or []
    return Conversation(messages, **switches, template_kwargs=variables, tools=tools)


def read_conversation(fields: Mapping[str, Any], path: Path = ("messages",)) -> Conversation:
    """Parse a request's ``messages``, perhaps a user's text, and the fields of `TEMPLATED`."""
    messages = read_input(fields["messages"], path)
    return make_conversation(messages, Fields(TEMPLATED, is_open=True)(fields))
