"""A job: a file of prompts in, a file of results out, resumable."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from h2okv.console import format_bytes
from h2okv.engine.detokenizer import Detokenizer
from h2okv.integration.loading import Described
from h2okv.offload.batch_runner import BatchSequence, PromptId, Runner
from h2okv.provenance import digest
from h2okv.records import Record, ResultFile, check_text, decode_text, naming

_LINE = '{"prompt": "..."}'


class Prompt(NamedTuple):
    """What a line of the input asks for."""

    id: PromptId
    content: Any  # a text or messages
    digest: str  # of the content


class PromptLine(NamedTuple):
    """Where a prompt is in the input, and the digest of its content."""

    number: int
    start: int  # its first byte
    digest: str


class PromptFile:
    """Lines ``{"id", "prompt"}`` or ``{"id", "messages"}``; one that changes later is noticed.

    Where a line has no id its number is, from 1.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, PromptLine] = {}  # by the prompt's id as JSON
        start = 0
        with naming(path, "read", "give a JSONL file"), path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                if data.strip(b"\xef\xbb\xbf \t\r\n"):
                    place = f"line {number} of '{path}'"
                    prompt = _parse(data, place, number)
                    name = json.dumps(prompt.id)
                    own = PromptLine(number, start, prompt.digest)
                    if (first := self.lines.setdefault(name, own)) is not own:
                        raise ValueError(
                            f"{place}: id {name} is that of line {first.number} too; give every"
                            " prompt an id of its own"
                        )
                start += len(data)
        if not self.lines:
            raise ValueError(f"'{path}' has no prompts; give lines such as {_LINE}")

    def read(self, name: str) -> Prompt:
        """Reads a prompt again, by its id as JSON."""
        line = self.lines[name]
        with naming(self.path, "read", "give a JSONL file"), self.path.open("rb") as file:
            file.seek(line.start)
            data = file.readline()
        with suppress(ValueError):
            prompt = _parse(data, name, line.number)
            if (json.dumps(prompt.id), prompt.digest) == (name, line.digest):
                return prompt
        raise ValueError(
            f"'{self.path}' has changed while it was read (id {name}); leave it as it is during a"
            " job, and run the command again"
        )


def _parse(data: bytes, place: str, number: int) -> Prompt:
    fields, problem = Record.parse(decode_text(data, place).strip(), place, _LINE).fields, ""
    prompt_id: Any = fields.get("id", number)
    content = fields.get("prompt", fields.get("messages"))
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, (str, int)):
        problem = f"id {json.dumps(prompt_id)} is not a name; give a text or a whole number"
    elif "prompt" in fields and "messages" in fields:
        problem = "it has both prompt and messages; leave one of them out"
    elif "messages" in fields and not isinstance(content, list):
        problem = 'messages are not a list; write [{"role": "user", "content": "..."}]'
    if problem:
        raise ValueError(f"{place}: {problem}")
    return Prompt(prompt_id, content, digest(json.dumps(content, sort_keys=True)))


@dataclass(frozen=True)
class TextCodec:
    """Encodes prompts and decodes results."""

    described: Described
    max_new_tokens: int = 1
    is_raw: bool = False  # whether texts are continued, not answered through the chat template

    @property
    def uses_template(self) -> bool:
        """Whether a text is a user's message for the model's chat template."""
        return not self.is_raw and bool(self.described.tokenizer.chat_template)

    def encode(self, prompt: Any) -> list[int]:
        """Encodes a text or messages; raises `ValueError` for what cannot be served."""
        if isinstance(prompt, list) and self.is_raw:
            raise ValueError("messages need the chat template; leave out --raw, or give a prompt")
        if isinstance(prompt, list):
            prompt = [_checked(own, number) for number, own in enumerate(prompt)]
        elif check_text(prompt, "the prompt") and self.uses_template:
            prompt = [{"role": "user", "content": prompt}]
        return self.described.encode(prompt)

    def sequence(self, prompt: Prompt, longest: int | None) -> BatchSequence:
        """Encodes a prompt, with as many new tokens as the context window has room for."""
        tokens = self.encode(prompt.content)
        if longest is not None and len(tokens) > longest:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and the memory that was promised is enough"
                f" for {longest}; shorten it or give more --memory"
            )
        left = self.described.room(len(tokens), self.max_new_tokens)
        return BatchSequence(prompt.id, tokens, left, prompt.digest, left < self.max_new_tokens)

    def record(self, sequence: BatchSequence) -> dict[str, Any]:
        """A finished sequence's result; its text has the space that follows the prompt."""
        text = Detokenizer(self.described.tokenizer, sequence.prompt)
        return {
            "id": sequence.id,
            "text": text.add(sequence.new_tokens) + text.end(),
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt),
            "new_tokens": len(sequence.new_tokens),
            "prompt_digest": sequence.digest,
        }


def _checked(message: Any, number: int) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(
            f'messages[{number}] is not {{"role": "user", "content": "..."}}; write it so'
        )
    record, roles = Record(message, f"messages[{number}]"), ("system", "user", "assistant")
    return {"role": roles[record.choice("role", roles)], "content": record.text("content")}


def generate_records(
    prompts: Iterable[Prompt], codec: TextCodec, runner: Runner
) -> Iterator[list[dict[str, Any]]]:
    """Generates for prompts; yields the results of each weight pass, refusals among them."""
    refused: list[dict[str, Any]] = []

    def sequences() -> Iterator[BatchSequence]:
        for prompt in prompts:
            try:
                yield codec.sequence(prompt, runner.limits.longest_prompt)
            except ValueError as error:
                told = {"error": str(error).rstrip("."), "prompt_digest": prompt.digest}
                refused.append({"id": prompt.id, **told})

    for done in runner.run(sequences()):
        yield [*refused, *map(codec.record, done)]
        refused.clear()
    yield refused


@dataclass(frozen=True)
class Summary:
    """A finished job."""

    prompts: int  # of the whole job
    skipped: int  # finished by an earlier run
    errors: int  # results that are an error, those of earlier runs included
    prompt_tokens: int = 0  # of this run, as all that follows
    new_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    predicted: float | None = None  # new tokens per second, by the plan
    bytes_read: int = 0  # weights, from the disk
    cache_bytes_read: int = 0  # keys and values, from the file
    wait_seconds: float = 0.0  # that computing waited for weights
    plan: dict[str, Any] | None = None
    peak_bytes: int | None = None  # peak resident memory
    data_bytes: int | None = None  # the process's data at the end

    @property
    def tokens_per_second(self) -> float:
        """New tokens of this run, prefill included in the time."""
        return self.new_tokens / max(self.seconds, 1e-9)

    def to_text(self) -> str:
        predicted = "" if self.predicted is None else f" ({self.predicted:,.1f} predicted)"
        parts = [
            f"{self.prompts} prompts",
            f"{self.skipped} of them finished before" if self.skipped else "",
            f"{self.errors} with an error record" if self.errors else "",
            f"{self.new_tokens} new tokens in {self.seconds:.1f} s",
            f"{self.tokens_per_second:,.1f} tokens/s{predicted}",
            f"{format_bytes(self.bytes_read)} of weights read" if self.bytes_read else "",
            f"peak memory {format_bytes(self.peak_bytes)}" if self.peak_bytes is not None else "",
        ]
        return ", ".join(filter(None, parts))


class Job(ResultFile):
    """Prompts and the file of their results; what made these is in a file beside it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], prompts: PromptFile) -> None:
        self.prompts = prompts
        self.finished: dict[str, str] = {}  # the digest of each prompt, by its id as JSON
        self.num_errors = 0  # results that say why a prompt could not be served
        super().__init__(path, "h2okv batch", settings=settings)

    def take(self, record: Record) -> None:
        if not {"id", "prompt_digest"} <= record.fields.keys():
            raise ValueError(f"{record.place} is not a result of {self.kind}; choose another file")
        self.finished[json.dumps(record.fields["id"])] = record.fields["prompt_digest"]
        self.num_errors += "error" in record.fields

    def check_prompts(self) -> None:
        """Refuses results of other prompts."""
        for name, found in self.finished.items():
            line = self.prompts.lines.get(name)
            if line is None or line.digest != found:
                other = f"another prompt with id {name}"
                what = f"id {name}, which is not in the input" if line is None else other
                raise ValueError(
                    f"'{self.path}' has a result for {what}; choose another file, or give the input"
                    " that it was begun with"
                )

    def unfinished(self) -> list[str]:
        """The prompts without a result, by their ids as JSON."""
        return [name for name in self.prompts.lines if name not in self.finished]

    def collect(
        self, blocks: Iterable[list[dict[str, Any]]], told: Callable[[float, int], None]
    ) -> Summary:
        """Writes results as they come; ``told`` hears the seconds and the new tokens so far."""
        skipped, start, seconds = len(self.finished), time.perf_counter(), 0.0
        prompt_tokens = new_tokens = 0
        for records in blocks:
            if records:
                self.append(records)
            prompt_tokens += sum(record.get("prompt_tokens", 0) for record in records)
            new_tokens += sum(record.get("new_tokens", 0) for record in records)
            seconds = time.perf_counter() - start
            told(seconds, new_tokens)
        counts = len(self.prompts.lines), skipped, self.num_errors, prompt_tokens, new_tokens
        return Summary(*counts, seconds=seconds)
