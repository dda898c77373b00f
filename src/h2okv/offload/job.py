"""A job: a file of prompts in, a file of results out, resumable."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from h2okv.console import format_bytes
from h2okv.engine.detokenizer import SequenceText
from h2okv.engine.sampling_params import SAMPLING, SamplingParams, sampling_values
from h2okv.models.loading import Described
from h2okv.offload.batch_runner import BatchSequence, PromptId, Runner, sequence_seed
from h2okv.prompts import readers
from h2okv.prompts.chat_template import PLAIN_STOPS
from h2okv.prompts.messages import TEMPLATED, Conversation, read_conversation
from h2okv.prompts.readers import FieldError, Fields, Reader, Unsupported, request_fields
from h2okv.provenance import digest
from h2okv.records import (
    Record,
    ResultFile,
    check_text,
    decode_text,
    naming,
    parse_json,
    settings_path,
    short_repr,
)

_LINE = '{"prompt": "..."}'
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_REQUEST_ID = "batch_req_"
_UNSUPPORTED: Unsupported = {
    "tools": ("a batch calls no tools; leave it out",),
    "tool_choice": ("a batch calls no tools; leave it out", "none", "auto"),
    "stream": ("the answers of a batch are whole; leave it out", False),
    "stream_options": ("the answers of a batch are whole; leave it out",),
    "n": ("a line of a batch has one answer; give more lines", 1),
    "best_of": ("a line of a batch has one answer; leave it out", 1),
    "logprobs": ("a batch has no log-probabilities; leave it out", False),
    "top_logprobs": ("a batch has no log-probabilities; leave it out", 0),
    "echo": ("a batch does not repeat prompts; leave it out", False),
    "h2o": ("the cache is the command's; leave it out",),
}
_TEXT: Mapping[str, Reader] = {
    **SAMPLING,
    "max_tokens": readers.integer(1),
    "model": readers.text,
    "prompt": readers.any_value,  # which is read as it is needed
}
_CHAT = {
    **{name: reader for name, reader in _TEXT.items() if name != "prompt"},
    **TEMPLATED,
    "messages": readers.list_of(readers.any_value),
    "max_completion_tokens": readers.integer(1),
}
_LINE_FIELDS = request_fields({**_TEXT, **_CHAT, "id": readers.any_value}, {}, _UNSUPPORTED)
_BODIES = {
    CHAT: request_fields(_CHAT, {"messages": "a list of them"}, _UNSUPPORTED),
    COMPLETION: request_fields(_TEXT, {"prompt": "a text"}, _UNSUPPORTED),
}
_OPENAI_LINE = Fields(
    {
        "custom_id": readers.text,
        "method": readers.one_of("POST"),
        "url": readers.one_of(*_BODIES),
        "body": readers.mapping,
    },
    {"custom_id": "a text", "url": " or ".join(_BODIES), "body": "a request"},
)
_REQUEST_FIELDS = {"prompt", "messages"}


class Prompt(NamedTuple):
    """A request in a line of the input."""

    id: PromptId
    content: Any  # a text, tokens or messages
    digest: str  # of the line without its id
    fields: dict[str, Any] = {}  # those that control how the content is rendered
    sampling: dict[str, Any] = {}  # parameters that replace those of the job
    url: str | None = None  # of a line in OpenAI's batch format
    model: str | None = None  # the name that the line gives
    number: int = 0  # of the line, from 1


class PromptFile:
    """Lines ``{"id", "prompt"}`` or ``{"id", "messages"}``, or those of OpenAI's batch format.

    A line without an id has its number as id, from 1.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, Prompt] = {}  # by the prompt's id as JSON
        with naming(path, "read", "give a JSONL file"), path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                if data.strip(b"\xef\xbb\xbf \t\r\n"):
                    location = f"line {number} of '{path}'"
                    prompt = _parse(data, location, number)._replace(number=number)
                    name = json.dumps(prompt.id)
                    if (first := self.lines.setdefault(name, prompt)) is not prompt:
                        raise ValueError(
                            f"{location}: id {name} is that of line {first.number} too; give every"
                            " prompt an id of its own"
                        )
        if not self.lines:
            raise ValueError(f"'{path}' has no prompts; give lines such as {_LINE}")

    def check_model(self, *names: str) -> None:
        """Refuse lines for another model, by the names of the command's model."""
        for line in self.lines.values():
            if line.model is not None and line.model not in names:
                raise ValueError(
                    f"line {line.number} of '{self.path}': model={short_repr(line.model)} is not"
                    f" this command's model; give {names[0]!r}, or leave it out"
                )


def _parse(data: bytes, location: str, number: int) -> Prompt:
    fields = Record.parse(decode_text(data, location).strip(), location, _LINE).fields
    is_openai = "body" in fields or ("custom_id" in fields and not fields.keys() & _REQUEST_FIELDS)
    try:
        return _read_openai_line(fields) if is_openai else _read_line(fields, number)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error


def _read_line(fields: dict[str, Any], number: int) -> Prompt:
    """Read a line of h2okv's format: an id, a prompt or messages, and fields of a request."""
    if not fields.keys() & _REQUEST_FIELDS:
        names = ", ".join(map(short_repr, [*fields][:5])) or "no fields"
        raise ValueError(f"it has neither prompt nor messages, only {names}; give one of them")
    if "custom_id" in fields:
        raise ValueError("custom_id is for a line with a body; give id instead")
    prompt_id = fields.get("id", number)
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, (str, int)):
        problem = f"id {json.dumps(prompt_id)} is not a name; give a text or a whole number"
        raise ValueError(problem)
    read = _LINE_FIELDS(fields)
    if "prompt" in read and "messages" in read:
        raise ValueError("it has both prompt and messages; leave one of them out")
    return _make_prompt(prompt_id, read, None)


def _read_openai_line(fields: dict[str, Any]) -> Prompt:
    """Read a line of OpenAI's batch format, which has the request as its body."""
    line = _OPENAI_LINE(fields)
    url, path = line["url"], ("body",)
    return _make_prompt(line["custom_id"], _BODIES[url](line["body"], path), url, path)


def _make_prompt(
    prompt_id: PromptId, read: dict[str, Any], url: str | None, path: readers.Path = ()
) -> Prompt:
    content, sampling = read.get("prompt", read.get("messages")), sampling_values(read, path)
    rendering = {name: read[name] for name in TEMPLATED if name in read}
    line = [content, rendering, sampling] if rendering or sampling else content
    name = digest(json.dumps(line if url is None else [prompt_id, url, line], sort_keys=True))
    return Prompt(prompt_id, content, name, rendering, sampling, url, read.get("model"))


@dataclass(frozen=True)
class TextCodec:
    """Encodes prompts and decodes results."""

    described: Described
    sampling: SamplingParams = SamplingParams(max_tokens=1)  # for a line without parameters
    is_raw: bool = False  # whether texts are continued, not answered through the chat template

    @property
    def uses_template(self) -> bool:
        """Whether a text is a user's message for the model's chat template."""
        return not self.is_raw and bool(self.described.tokenizer.chat_template)

    def _rendered(self, prompt: Any, fields: Mapping[str, Any]) -> str | Conversation:
        is_chat = isinstance(prompt, list)
        if is_chat and self.is_raw:
            raise ValueError("messages need the chat template; leave out --raw, or give a prompt")
        if is_chat or (check_text(prompt, "the prompt") and self.uses_template):
            return read_conversation({**fields, "messages": prompt})
        return str(prompt)

    def sequence(self, prompt: Prompt, longest: int | None) -> BatchSequence:
        """Encode a prompt; limit its new tokens to the room in the context window."""
        described, params = self.described, replace(self.sampling, **prompt.sampling)
        rendered = self._content(prompt)
        if isinstance(rendered, list):
            tokens = described.checked(rendered)
        else:
            tokens = described.encode(rendered)
        limits = replace(described.limits, max_prompt_tokens=longest or sys.maxsize)
        limits.check_length(len(tokens), remedy="shorten it, or give more --memory")
        limits.check_tokens(params.logit_bias, "logit_bias")
        # As in the server: in the plain form an answer ends before the user's next line.
        is_plain = isinstance(rendered, Conversation) and not described.tokenizer.chat_template
        stop = (*params.stop, *(PLAIN_STOPS if is_plain else ()))
        strips_start = isinstance(rendered, Conversation) and is_plain and not rendered.continues
        if "seed" not in prompt.sampling:
            params = replace(params, seed=sequence_seed(params.seed, prompt.id))
        limit = params.max_tokens or 1
        left = limits.room(len(tokens), limit)
        return BatchSequence(
            prompt.id, tokens, left, params, prompt.digest, left < limit, url=prompt.url,
            text=SequenceText(described.tokenizer, tokens, stop, strips_start) if stop else None,
        )  # fmt: skip

    def _content(self, prompt: Prompt) -> str | Conversation | list[int]:
        """Render a prompt as the server would, or as a line of h2okv's format says."""
        if prompt.url != COMPLETION:
            return self._rendered(prompt.content, prompt.fields)
        listed = prompt.content if isinstance(prompt.content, list) else [prompt.content]
        if listed and all(type(token) is int for token in listed):
            return listed
        if len(listed) != 1:
            raise ValueError("the prompt is a list; give one text, or the tokens of one")
        return check_text(listed[0], "the prompt")

    def record(self, sequence: BatchSequence) -> dict[str, Any]:
        """Return a finished sequence's result; its text has the space that follows the prompt."""
        text = sequence.text
        if text is None:
            text = SequenceText(self.described.tokenizer, sequence.prompt)
            for token in sequence.new_tokens[: -1 if sequence.finish_reason == "eos" else None]:
                text.add(token)
        if sequence.url is not None:
            return self._response(sequence, text.end())
        return {
            "id": sequence.id,
            "text": text.end(),
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt),
            "new_tokens": len(sequence.new_tokens),
            "prompt_digest": sequence.digest,
        }

    def _response(self, sequence: BatchSequence, text: str) -> dict[str, Any]:
        """Return a result in OpenAI's batch format."""
        is_chat, read, new = sequence.url == CHAT, len(sequence.prompt), len(sequence.new_tokens)
        is_cut = sequence.finish_reason in ("length", "context")
        choice = {"index": 0, "finish_reason": "length" if is_cut else "stop", "logprobs": None}
        answer = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{sequence.digest}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.described.name,
            "choices": [choice | answer],
            "usage": {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new},
        }
        return _openai_record(sequence.id, sequence.digest, 200, body, None)


def _openai_record(
    prompt_id: PromptId, name: str, status: int, body: dict[str, Any], error: Any
) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    line = {"id": f"{_REQUEST_ID}{name}", "custom_id": prompt_id}
    return {**line, "response": response, "error": error}


def _token_counts(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of the prompt and the new ones, in either format of results."""
    usage = (record.get("response") or {}).get("body", {}).get("usage")
    if usage is not None:
        return usage["prompt_tokens"], usage["completion_tokens"]
    return record.get("prompt_tokens", 0), record.get("new_tokens", 0)


def _error_record(prompt: Prompt, error: ValueError) -> dict[str, Any]:
    message = str(error).rstrip(".")
    if prompt.url is None:
        return {"id": prompt.id, "error": message, "prompt_digest": prompt.digest}
    code, param = "invalid_value", None
    if isinstance(error, FieldError):
        code, param = error.code, error.name
    problem = {"message": message, "code": code}
    body = {"error": {**problem, "type": "invalid_request_error", "param": param}}
    return _openai_record(prompt.id, prompt.digest, 400, body, problem)


def generate_records(
    prompts: Iterable[Prompt], codec: TextCodec, runner: Runner
) -> Iterator[list[dict[str, Any]]]:
    """Generate for prompts; yield the results of each weight pass, refusals included."""
    refused: list[dict[str, Any]] = []

    def sequences() -> Iterator[BatchSequence]:
        for prompt in prompts:
            try:
                yield codec.sequence(prompt, runner.limits.longest_prompt)
            except ValueError as error:
                refused.append(_error_record(prompt, error))

    for done in runner.run(sequences()):
        yield [*refused, *map(codec.record, done)]
        refused.clear()
    yield refused


@dataclass(frozen=True)
class Summary:
    """A finished job."""

    prompts: int  # of the entire job
    skipped: int  # finished by an earlier run
    errors: int  # results with an error, of earlier runs too
    prompt_tokens: int = 0  # of this run, like all fields below
    new_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    predicted: float | None = None  # new tokens per second, by the plan
    bytes_read: int = 0  # weights, from the disk
    wait_seconds: float = 0.0  # that the computation waited for weights
    plan: dict[str, Any] | None = None
    peak_bytes: int | None = None  # peak resident memory
    data_bytes: int | None = None  # the process's data at the end

    @property
    def tokens_per_second(self) -> float:
        """New tokens of this run, prefill included in the time."""
        return self.new_tokens / max(self.seconds, 1e-9)

    def to_text(self) -> str:
        predicted = "" if self.predicted is None else f" ({self.predicted:,.1f} predicted)"
        phrases = [
            f"{self.prompts} prompt{'s' * (self.prompts != 1)}",
            f"{self.skipped} of them finished before" if self.skipped else "",
            f"{self.errors} with an error record" if self.errors else "",
            f"{self.new_tokens} new tokens in {self.seconds:.1f} s",
            f"{self.tokens_per_second:,.1f} tokens/s{predicted}",
            f"{format_bytes(self.bytes_read)} of weights read" if self.bytes_read else "",
            f"peak memory {format_bytes(self.peak_bytes)}" if self.peak_bytes is not None else "",
        ]
        return ", ".join(filter(None, phrases))


def saved_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a job that has results in a file; nothing if there is none."""
    with suppress(OSError, ValueError, TypeError):
        if path.stat().st_size:
            return dict(parse_json(settings_path(path).read_text(encoding="utf-8")))
    return {}


class Job(ResultFile):
    """Prompts and the file of their results; a second file has the settings of the job."""

    def __init__(self, path: Path, settings: Mapping[str, Any], prompts: PromptFile) -> None:
        self.prompts = prompts
        self.finished: dict[str, str] = {}  # the digest of each prompt, by its id as JSON
        self.num_errors = 0  # results of prompts that could not be served
        super().__init__(path, "h2okv batch", settings=settings)

    def take(self, record: Record) -> None:
        fields = record.fields
        if {"id", "prompt_digest"} <= fields.keys():
            prompt_id, name = fields["id"], fields["prompt_digest"]
        elif "custom_id" in fields and str(fields.get("id")).startswith(_REQUEST_ID):
            prompt_id, name = fields["custom_id"], fields["id"].removeprefix(_REQUEST_ID)
        else:
            raise self.foreign(record.location)
        self.finished[json.dumps(prompt_id)] = name
        self.num_errors += fields.get("error") is not None

    def check_prompts(self) -> None:
        """Refuse results of other prompts."""
        for name, prompt_digest in self.finished.items():
            line = self.prompts.lines.get(name)
            if line is None or line.digest != prompt_digest:
                other = f"another prompt with id {name}"
                description = f"id {name}, which is not in the input" if line is None else other
                raise ValueError(
                    f"'{self.path}' has a result for {description}; choose another file, or give"
                    " the input that it was begun with"
                )

    def unfinished(self) -> list[Prompt]:
        """Return the prompts without a result."""
        return [prompt for name, prompt in self.prompts.lines.items() if name not in self.finished]

    def collect(
        self, blocks: Iterable[list[dict[str, Any]]], report: Callable[[float, int], None]
    ) -> Summary:
        """Write results as they arrive; call ``report`` with the seconds and new tokens so far."""
        skipped, start, seconds = len(self.finished), time.perf_counter(), 0.0
        prompt_tokens = new_tokens = 0
        for records in blocks:
            if records:
                self.append(records)
            for record in records:
                read, new = _token_counts(record)
                prompt_tokens, new_tokens = prompt_tokens + read, new_tokens + new
            seconds = time.perf_counter() - start
            report(seconds, new_tokens)
        counts = len(self.prompts.lines), skipped, self.num_errors, prompt_tokens, new_tokens
        return Summary(*counts, seconds=seconds)
