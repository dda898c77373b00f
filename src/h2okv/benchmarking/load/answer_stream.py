"""The events of a streamed answer (server-sent events, as OpenAI's API sends them)."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable
from typing import Any

from h2okv.benchmarking.load.outcome import Outcome

_DATA = "data:"
_END = "[DONE]"


class AnswerFailedError(RuntimeError):
    """The answer is none, or not whole.

    Attributes:
        kind: What went wrong, the same words for the same kind.
        message: What was said about it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


async def read_answer(lines: AsyncIterable[bytes], outcome: Outcome) -> None:
    """Reads a stream to its end.

    Args:
        lines: The lines of the response.
        outcome: Gets arrivals and token counts as they come; mutated.

    Raises:
        AnswerFailedError: If the stream tells of an error, makes no sense or ends too early.
    """
    is_whole = False
    async for raw in lines:
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA).strip()
        if data == _END:
            is_whole = True
            break
        is_whole = _take(_parse(data), outcome) or is_whole
    if not is_whole:
        raise AnswerFailedError("cut off", "the stream ended before a finish_reason or [DONE]")


def _parse(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise AnswerFailedError("not JSON", data[:200])
    if event.get("error"):
        raise AnswerFailedError("error in stream", json.dumps(event["error"])[:200])
    return event


def _take(event: dict[str, Any], outcome: Outcome) -> bool:
    """Takes one event; whether it ends the answer."""
    usage = event.get("usage")
    if isinstance(usage, dict):
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.new_tokens = usage.get("completion_tokens")
    is_last = False
    has_text = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        # A chat's first event only names the role; it is no token.
        has_text = has_text or bool(choice.get("text") or delta.get("content"))
        is_last = is_last or choice.get("finish_reason") is not None
    if has_text:
        outcome.arrivals.append(time.perf_counter())
    return is_last
