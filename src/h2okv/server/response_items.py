"""Tools, calls and results in the form of OpenAI's Responses API, read as those of chats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from h2okv.integration.messages import Conversation, FieldError, Message, read_conversation


def read_response_conversation(fields: Mapping[str, Any]) -> Conversation:
    """Read the conversation of a request with ``input``, ``tools`` and ``tool_choice``.

    Raises:
        FieldError: If a field is invalid; its path is that of the request.
    """
    items, tools = fields["input"], fields.get("tools")
    listed = isinstance(tools, (list, tuple))
    chat = {
        **fields,
        "input": [_as_message(item, at) for at, item in enumerate(items)],
        "tools": [nested(tool) for tool in tools] if listed and tools else tools,
    }
    try:
        conversation = read_conversation(chat, "input")
    except FieldError as error:
        raise FieldError(_path(error.path, items), error.problem, error.code) from error
    return dataclasses.replace(conversation, messages=_joined(conversation.messages))


def nested(value: Any) -> Any:
    """Return a flat function as chats have it; other values as they are."""
    is_flat = isinstance(value, Mapping) and value.get("type") == "function"
    if not is_flat or "function" in value:
        return value
    function = {name: entry for name, entry in value.items() if name != "type"}
    return {"type": "function", "function": function}


def _as_message(item: Any, at: int) -> Any:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind != "function_call_output":
        return item
    if "output" not in item:
        raise FieldError(("input", at, "output"), " is missing; give it", "missing_field")
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]}


def _path(path: Sequence[str | int], items: Sequence[Any]) -> list[str | int]:
    """Return the path of a chat's field as a request of responses has it."""
    if path[0] != "input" or len(path) < 3:
        return [step for step in path if step != "function"]
    item: Any = items[int(path[1])]
    if isinstance(item, Mapping) and item.get("type") == "function_call":
        return [*path[:2], path[-1]]
    if isinstance(item, Mapping) and item.get("type") == "function_call_output":
        names = {"content": "output", "tool_call_id": "call_id"}
        return [names.get(str(step), step) for step in path]
    return list(path)


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with each call in the message of the answer that it belongs to."""
    joined: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and not message["content"] and joined and joined[-1]["role"] == "assistant":
            calls = [*joined[-1].get("tool_calls", ()), *calls]
            joined[-1] = {**joined[-1], "tool_calls": calls}
        else:
            joined.append(dict(message))
    return joined
