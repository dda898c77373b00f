"""Answers in the form of OpenAI's Responses API: one message of text."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, ClassVar

from h2okv.engine.outputs import Completion, OutputDelta
from h2okv.server.responses import ResponseBuilder


class ResponsesBuilder(ResponseBuilder):
    """A response, or the events of one that is made."""

    kinds = ("resp", "response", "response")
    says_done: ClassVar[bool] = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._item = f"msg-{secrets.token_hex(12)}"
        self._num_events = 0

    @property
    def _status(self) -> str:
        reason = self.outputs[0].finish_reason
        return {None: "in_progress", "length": "incomplete"}.get(reason, "completed")

    def whole(self) -> dict[str, Any]:
        """See `ResponseBuilder.whole`."""
        body, (output,), is_over = self.body, self.outputs, self._status != "in_progress"
        is_cut = self._status == "incomplete"
        return {
            "id": self._shared["id"],
            "object": "response",
            "created_at": self._shared["created"],
            "status": self._status,
            "model": body.model,
            "instructions": body.instructions,
            "output": [self._choice(output, self._status)] if is_over else [],
            "usage": self._usage() if is_over else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "metadata": body.metadata or {},
            "store": False,
            "error": None,
        }

    def opening(self) -> Iterable[dict[str, Any]]:
        """See `ResponseBuilder.opening`: an empty message."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.whole() | {"status": "in_progress", "output": []})
        item = self._message("in_progress", [])
        yield self._event("response.output_item.added", item=item, output_index=0)
        yield self._part_event("response.content_part.added", part=self._part(""))

    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        text, kept = self._new_text(delta), self._kept(0, delta.kept)
        if text or kept:
            yield self._part_event("response.output_text.delta", delta=text, logprobs=[], **kept)

    def closing(self) -> Iterable[dict[str, Any]]:
        text = self._text(self.outputs[0])
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=self._part(text))
        item = self._choice(self.outputs[0], self._status)
        yield self._event("response.output_item.done", item=item, output_index=0)
        yield self._event(f"response.{self._status}", response=self.whole())

    def _choice(self, output: Completion, finish_reason: str) -> dict[str, Any]:
        message = self._message(finish_reason, [self._part(self._text(output))])
        return message | (self._kept(0, output.kept) if not self.body.stream else {})

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        own = {"id": self._item, "type": "message", "role": "assistant"}
        return {**own, "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}

    def _usage(self) -> dict[str, Any]:
        told = super()._usage()
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
        }
