"""Responses in OpenAI's format, complete or as chunks of a stream."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from h2okv.engine.detokenizer import TokenText
from h2okv.engine.outputs import (
    Completion,
    KeptTokens,
    OutputDelta,
    PromptRead,
    TokenLogprob,
    VerifiedAnswer,
)
from h2okv.prompts.images import EncodedPrompt
from h2okv.server.tools import Segment, ToolCall, ToolCallParser

_FINGERPRINT = "h2okv"
"""OpenAI's ``system_fingerprint``: the same seed gives the same text only on the same server."""


class ResponseBuilder(ABC):
    """Builds a response, as objects for JSON, from deltas; omits the fields that OpenAI omits."""

    # Prefix of the id, and ``object`` of the complete response and of a chunk.
    kinds: ClassVar[tuple[str, str, str]]
    says_done: ClassVar[bool] = True  # whether a stream ends with ``[DONE]``

    def __init__(self, body: Any, prompts: Sequence[EncodedPrompt], tokens: TokenText) -> None:
        self.body, self.prompts, self.num_outputs = body, prompts, body.n or 1
        # One for each choice, prompt by prompt.
        self.outputs = [Completion(index) for index in range(self.num_outputs * len(prompts))]
        self._tokens = tokens
        # The plain form has a space between "Assistant:" and the answer.
        self._strips_start = prompts[0].strips_start
        self._read: dict[int, PromptRead] = {}
        self.verified: dict[int, VerifiedAnswer] = {}  # by prompt
        # For each output: the number of tokens whose texts were sent with the kept tokens, and the
        # decoder of their bytes.
        self._num_reported: dict[int, int] = defaultdict(int)
        self._decoders: dict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")("replace")
        )
        self._parsers: dict[int, ToolCallParser] = defaultdict(
            lambda: ToolCallParser(**body.call_options)
        )
        self._num_calls: dict[int, int] = defaultdict(int)
        self._shared = {
            "id": f"{self.kinds[0]}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": _FINGERPRINT,
        }

    def take(self, delta: OutputDelta) -> OutputDelta:
        """Add a delta to its output; return it with the text to be sent."""
        output = self.outputs[delta.index]
        if self._strips_start and not output.text:
            delta = replace(delta, text=delta.text.lstrip())
        if delta.prompt is not None:
            self._read[delta.index // self.num_outputs] = delta.prompt
        output.add(delta)
        return delta

    def response(self) -> dict[str, Any]:
        """Return the complete response to a finished request."""
        # Outputs of no tokens have no finish reason.
        outputs = self.outputs
        choices = [self._choice(output, output.finish_reason or "length") for output in outputs]
        usage = self._usage()
        return {"object": self.kinds[1], "choices": choices, "usage": usage, **self._shared}

    def opening(self) -> Iterable[dict[str, Any]]:
        """Yield the chunks before any text."""
        return ()

    @abstractmethod
    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a delta, after `take`."""

    def closing(self) -> Iterable[dict[str, Any]]:
        """Yield the chunks after all text."""
        if self.body.wants_usage:
            chunk = {"object": self.kinds[2], "choices": [], "usage": self._usage()}
            yield {**chunk, **self._shared}

    def _choice(self, output: Completion, finish_reason: str) -> dict[str, Any]:
        """Return an output as a choice of the complete response."""
        kept_field = self._kept_field(output.index, output.kept)
        return {"index": output.index, "finish_reason": finish_reason, **kept_field}

    def _chunk(self, index: int, finish_reason: str | None, **choice: Any) -> dict[str, Any]:
        choice |= {"index": index, "finish_reason": finish_reason}
        # With include_usage, all chunks have the field, and only the last one a value.
        usage = {"usage": None} if self.body.wants_usage else {}
        return {"object": self.kinds[2], "choices": [choice], **usage, **self._shared}

    def _segments(self, index: int, text: str, is_end: bool) -> list[Segment]:
        """Return the next segments of an output, and count its calls."""
        if not self.body.may_call:
            return [text] if text else []
        parser, limit = self._parsers[index], self.body.max_calls
        is_cut = self.outputs[index].finish_reason == "length"
        segments = [*parser.add(text), *(parser.end(is_cut) if is_end else ())]
        passed: list[Segment] = []
        for segment in segments:
            if isinstance(segment, ToolCall):
                if self._num_calls[index] == limit:
                    continue
                self._num_calls[index] += 1
            passed.append(segment)
        return passed

    def _kept_field(self, index: int, kept_tokens: KeptTokens | None) -> dict[str, Any]:
        """Return the tokens that the cache holds, with the texts that were not sent yet."""
        if kept_tokens is None:
            return {}
        before, self._num_reported[index] = self._num_reported[index], len(kept_tokens.counts)
        prompt, output = self.prompts[index // self.num_outputs], self.outputs[index]
        tokens = [*prompt.token_ids, *output.token_ids][before : len(kept_tokens.counts)]
        decode = self._decoders[index].decode  # a character of several tokens is the last one's
        fields = {name: value for name, value in vars(kept_tokens).items() if name != "counts"}
        fields["tokens"] = [decode(self._tokens.data(token)) for token in tokens]
        return {"h2o": {**fields, "kept": kept_tokens.counts}}

    def _usage(self) -> dict[str, Any]:
        read = sum(len(prompt.token_ids) for prompt in self.prompts)
        new = sum(len(output.token_ids) for output in self.outputs)
        reused = sum(prompt.num_reused for prompt in self._read.values())
        thoughts = {"reasoning_tokens": sum(output.reasoning_tokens for output in self.outputs)}
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": reused},
            **({"completion_tokens_details": thoughts} if thoughts["reasoning_tokens"] else {}),
            **self._verified_field(),
        }

    def _verified_field(self) -> dict[str, Any]:
        """Return the figures of the answers that were read again, prompt by prompt."""
        figures = [self.verified[number].to_dict() for number in sorted(self.verified)]
        return {"h2o": {"verified": figures}} if figures else {}


def _as_object(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _as_deltas(call: ToolCall, number: int) -> Iterable[dict[str, Any]]:
    """Yield what a stream says of a call: first its id and name, then its arguments."""
    yield {"index": number, **_as_object(replace(call, arguments=""))}
    yield {"index": number, "function": {"arguments": call.arguments}}


class ChatResponseBuilder(ResponseBuilder):
    """An assistant's messages."""

    kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def _choice(self, output: Completion, finish_reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text}
        if self.body.may_call:
            segments = self._segments(output.index, output.text, is_end=True)
            text = "".join(segment for segment in segments if isinstance(segment, str))
            calls = [segment for segment in segments if isinstance(segment, ToolCall)]
            if text != output.text:  # what is left of it may be nothing
                message["content"] = text or None
            if calls:
                message["tool_calls"] = [*map(_as_object, calls)]
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        reason = self._reason(output.index, finish_reason)
        fields = {"message": message, "logprobs": self._logprobs(output.logprobs)}
        return super()._choice(output, reason) | fields

    def _reason(self, index: int, reason: str) -> str:
        return "tool_calls" if self._num_calls[index] and reason == "stop" else reason

    def opening(self) -> Iterable[dict[str, Any]]:
        for output in self.outputs:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(output.index, None, delta=delta, logprobs=None)

    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        index, more = delta.index, self._kept_field(delta.index, delta.kept)
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        before, is_end = self._num_calls[index], delta.finish_reason is not None
        entries: list[dict[str, Any]] = []
        if delta.reasoning:
            entries.append({"reasoning_content": delta.reasoning})
        for segment in self._segments(index, delta.text, is_end):
            if isinstance(segment, str):
                entries.append({"content": segment})
            else:
                entries += [{"tool_calls": [entry]} for entry in _as_deltas(segment, before)]
                before += 1
        if not entries and (more or logprobs):
            entries = [{"content": ""}]
        for entry in entries:
            yield self._chunk(index, None, delta=entry, logprobs=logprobs, **more)
            logprobs, more = None, {}  # with the first one
        if delta.finish_reason is not None:
            reason = self._reason(index, delta.finish_reason)
            yield self._chunk(index, reason, delta={}, logprobs=None)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        def fields(token: int, logprob: float) -> dict[str, Any]:
            data = list(self._tokens.data(token))
            return {"token": self._tokens.text(token), "bytes": data, "logprob": logprob}

        if not self.body.logprobs:
            return None
        content = [
            {**fields(new.token, new.logprob), "top_logprobs": [fields(*top) for top in new.top]}
            for new in logprobs
        ]
        return {"content": content}


Entry = tuple[int, TokenLogprob | None, int]
"""A token, its log-probability if known, and its number of characters."""


class CompletionResponseBuilder(ResponseBuilder):
    """Completions of prompts, after the prompts themselves with ``echo``."""

    kinds = ("cmpl", "text_completion", "text_completion")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Offset of the next token in the text of each choice.
        self._offsets: dict[int, int] = defaultdict(int)
        self._echoed: set[int] = set()

    def _choice(self, output: Completion, finish_reason: str) -> dict[str, Any]:
        text, entries = self._echo(output.index // self.num_outputs)
        logprobs = self._logprobs(output.index, [*entries, *self._entries(output.logprobs)])
        fields = {"text": text + output.text, "logprobs": logprobs}
        return super()._choice(output, finish_reason) | fields

    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        number = delta.index // self.num_outputs
        if self.body.echo and number not in self._echoed:
            self._echoed.add(number)
            text, entries = self._echo(number)
            for index in range(number * self.num_outputs, (number + 1) * self.num_outputs):
                yield self._chunk(index, None, text=text, logprobs=self._logprobs(index, entries))
        more = self._kept_field(delta.index, delta.kept)
        if delta.text or delta.logprobs or delta.finish_reason or more:
            more["logprobs"] = self._logprobs(delta.index, self._entries(delta.logprobs))
            yield self._chunk(delta.index, delta.finish_reason, text=delta.text, **more)

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> list[Entry]:
        return [
            (logprob.token, logprob, self._tokens.length(logprob.token)) for logprob in logprobs
        ]

    def _echo(self, number: int) -> tuple[str, list[Entry]]:
        """Return a prompt's text and tokens, the first of which has no log-probability."""
        if not self.body.echo:
            return "", []
        prompt, read = self.prompts[number], self._read.get(number)
        logprobs = (read and read.logprobs) or [None] * len(prompt.token_ids)
        lengths = [self._tokens.length(token) for token in prompt.token_ids]
        if prompt.is_text:
            # 0 characters of a special token that was prepended to the text.
            first = self._tokens.text(prompt.token_ids[0])
            forms = filter(prompt.text.startswith, (first, first.lstrip()))
            lengths[0] = len(next(forms, ""))
        return prompt.text, list(zip(prompt.token_ids, logprobs, lengths, strict=True))

    def _logprobs(self, index: int, entries: Sequence[Entry]) -> dict[str, list[Any]] | None:
        """Return the parallel lists of OpenAI's legacy format, for the next tokens of a choice."""
        if self.body.logprobs is None:
            return None
        columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        table: dict[str, list[Any]] = {name: [] for name in columns}
        for token, result, length in entries:
            tops: dict[str, float] = {}
            for top, logprob in (*result.top, (token, result.logprob)) if result else ():
                # Of tokens with equal text, the more likely one counts.
                tops.setdefault(self._tokens.text(top), logprob)
            table["tokens"].append(self._tokens.text(token))
            table["token_logprobs"].append(result and result.logprob)
            table["top_logprobs"].append(tops if result else None)
            table["text_offset"].append(self._offsets[index])
            self._offsets[index] += length
        return table


class ResponsesBuilder(ResponseBuilder):
    """A response of OpenAI's Responses API: messages of text and calls, or their events."""

    kinds = ("resp", "response", "response")
    says_done: ClassVar[bool] = False
    _repeated = ("model", "instructions", "max_output_tokens", "temperature", "top_p")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is a message that goes on
        self._num_events = 0

    @property
    def _status(self) -> str:
        reason = self.outputs[0].finish_reason
        return {None: "in_progress", "length": "incomplete"}.get(reason, "completed")

    def response(self) -> dict[str, Any]:
        body, output, is_over = self.body, self.outputs[0], self._status != "in_progress"
        stated = body.stated
        is_cut = self._status == "incomplete"
        if is_over and not body.stream:
            for _ in self._events_of(output.text, is_end=True):
                pass
            self._items[-1] |= self._kept_field(0, output.kept)
        return {
            "id": self._shared["id"],
            "object": "response",
            "created_at": self._shared["created"],
            "status": self._status,
            **{name: getattr(body, name) for name in self._repeated},
            "output": self._items if is_over else [],
            "usage": self._usage() if is_over else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "text": {"format": (stated.get("text") or {}).get("format") or {"type": "text"}},
            "tools": stated.get("tools") or [],
            "tool_choice": (stated.get("tool_choice") or "auto") if body.may_call else "none",
            "parallel_tool_calls": body.may_call and body.max_calls is None,
            "previous_response_id": None,
            "metadata": body.metadata or {},
            "store": False,
            "error": None,
        }

    def opening(self) -> Iterable[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(
                kind, response=self.response() | {"status": "in_progress", "output": []}
            )
        if not self.body.may_call:
            yield from self._open_message()

    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        events = list(self._events_of(delta.text, is_end=False))
        if kept_field := self._kept_field(0, delta.kept):
            if not any(event["type"].endswith(".delta") for event in events):
                events += [*self._open_message(), self._text_event("")]
            next(event for event in events if event["type"].endswith(".delta")).update(kept_field)
        return events

    def closing(self) -> Iterable[dict[str, Any]]:
        yield from self._events_of("", is_end=True)
        yield self._event(f"response.{self._status}", response=self.response())

    def _events_of(self, text: str, is_end: bool) -> Iterable[dict[str, Any]]:
        """Yield the events of the next text; mutates the items."""
        for segment in self._segments(0, text, is_end):
            if isinstance(segment, ToolCall):
                yield from self._close_message("completed")
                yield from self._call_events(segment)
                continue
            if self._items and not self._is_open:  # a text after a call
                segment = segment.lstrip()
            yield from self._open_message()
            self._items[-1]["content"][0]["text"] += segment
            yield self._text_event(segment)
        if is_end:
            if not self._items:
                yield from self._open_message()
            yield from self._close_message(self._status)

    def _open_message(self) -> Iterable[dict[str, Any]]:
        if self._is_open:
            return
        self._is_open = True
        item: dict[str, Any] = {"id": f"msg-{secrets.token_hex(12)}", "type": "message"}
        item |= {"role": "assistant", "status": "in_progress", "content": []}
        self._items.append(item)
        yield self._item_event("response.output_item.added", item=dict(item))
        item["content"] = [_content_part("")]
        yield self._part_event("response.content_part.added", part=_content_part(""))

    def _close_message(self, status: str) -> Iterable[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open, item = False, self._items[-1]
        item["status"], text = status, item["content"][0]["text"]
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=_content_part(text))
        yield self._item_event("response.output_item.done", item=item)

    def _call_events(self, call: ToolCall) -> Iterable[dict[str, Any]]:
        item = {"id": f"fc-{secrets.token_hex(12)}", "type": "function_call", "call_id": call.id}
        item |= {"name": call.name, "arguments": "", "status": "in_progress"}
        self._items.append(item)
        yield self._item_event("response.output_item.added", item=dict(item))
        item |= {"arguments": call.arguments, "status": "completed"}
        kind, where = "response.function_call_arguments", {"item_id": item["id"]}
        yield self._item_event(f"{kind}.delta", delta=call.arguments, **where)
        yield self._item_event(f"{kind}.done", arguments=call.arguments, name=call.name, **where)
        yield self._item_event("response.output_item.done", item=item)

    def _text_event(self, text: str) -> dict[str, Any]:
        return self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._item_event(kind, item_id=self._items[-1]["id"], content_index=0, **more)

    def _item_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.outputs[0].reasoning_tokens},
            "total_tokens": usage["total_tokens"],
            **self._verified_field(),
        }


def _content_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
