"""A job: a file of prompts in, a file of results out, resumable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from h2okv.console import format_bytes
from h2okv.engine.detokenizer import Detokenizer
from h2okv.integration.chat_template import ChatTemplateError, chat_text
from h2okv.offload.batch_runner import BatchSequence, PromptId, Runner
from h2okv.provenance import digest
from h2okv.records import Record, ResultFile, naming

_LINE = '{"id": 1, "prompt": "..."}'
ParsedLine = tuple[PromptId, Any, str]
"""A prompt's id, its text or messages, and their digest."""


@dataclass(frozen=True)
class PromptLine:
    """A prompt's line in the file: its bytes ``start`` to ``start + size``, and their digest."""

    id: PromptId
    start: int
    size: int
    digest: str


class PromptFile:
    """Lines ``{"id", "prompt"}`` or ``{"id", "messages"}``, scanned once, then read on demand.

    Only ids, places and digests are kept in memory. A line that changes after the scan is noticed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: Sequence[PromptLine] = list(self._scan())
        if not self.lines:
            raise ValueError(f"'{path}' has no prompts; give lines such as {_LINE}")

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, line: PromptLine) -> ParsedLine:
        """Reads a line again."""
        with self._opened() as file:
            file.seek(line.start)
            data = file.read(line.size)
        try:
            parsed = parse_line(data)
        except ValueError:
            parsed = (line.id, None, "")
        if parsed[2] != line.digest:
            raise ValueError(
                f"'{self.path}' has changed while it was read (id {json.dumps(line.id)}); leave it"
                " as it is during a job, and run the command again"
            )
        return parsed

    def _scan(self) -> Iterator[PromptLine]:
        known: dict[str, int] = {}
        start = 0
        with self._opened() as file:
            for number, data in enumerate(file, start=1):
                if data.strip(b"\xef\xbb\xbf \t\r\n"):
                    yield self._parse(number, start, data, known)
                start += len(data)

    def _parse(self, number: int, start: int, data: bytes, known: dict[str, int]) -> PromptLine:
        try:
            prompt_id, _, found = parse_line(data)
            name = json.dumps(prompt_id)
            if known.setdefault(name, number) != number:
                raise ValueError(
                    f"id {name} is that of line {known[name]} too; give every prompt an id of its"
                    " own"
                )
        except ValueError as error:
            raise ValueError(f"'{self.path}', line {number}: {error}") from error
        return PromptLine(prompt_id, start, len(data), found)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        remedy = "give a JSONL file with prompts"
        with naming(self.path, "read", remedy), self.path.open("rb") as file:
            yield file


def parse_line(data: bytes) -> ParsedLine:
    """Parses a line to the prompt's id, its text or messages, and their digest."""
    try:
        fields = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("this is not UTF-8 text; convert the file to UTF-8") from None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"this is no JSON object; write {_LINE}")
    prompt_id = fields.get("id")
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, (str, int)):
        raise ValueError(f"id {json.dumps(prompt_id)} is not a name; give a text or a whole number")
    if "prompt" in fields and "messages" in fields:
        raise ValueError("it has both prompt and messages; leave one of them out")
    prompt = fields.get("prompt", fields.get("messages"))
    if "messages" in fields and not isinstance(prompt, list):
        raise ValueError('messages are not a list; write [{"role": "user", "content": "..."}]')
    return prompt_id, prompt, digest(json.dumps(prompt, sort_keys=True))


class JobResultFile(ResultFile):
    """A job's results; its settings are in a file beside it."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.finished: dict[str, str] = {}  # the digest of each prompt, by its id as JSON
        self.num_errors = 0  # results that say why a prompt could not be served
        super().__init__(path, "h2okv batch", settings=settings)

    def take(self, record: Record) -> None:
        """See `ResultFile.take`."""
        if not {"id", "prompt_digest"} <= record.fields.keys():
            raise ValueError(f"{record.place} is not a result of {self.kind}; choose another file")
        self.finished[json.dumps(record.fields["id"])] = record.fields["prompt_digest"]
        self.num_errors += "error" in record.fields

    def check_prompts(self, lines: Sequence[PromptLine]) -> None:
        """Refuses results of other prompts."""
        digests = {json.dumps(line.id): line.digest for line in lines}
        for name, found in self.finished.items():
            what = f"a result for another prompt with id {name}"
            if name not in digests:
                what = f"a result for id {name}, which is not in the input"
            if digests.get(name) != found:
                raise ValueError(
                    f"'{self.path}' has {what}; choose another file, or give the input that it was"
                    " begun with"
                )


class PromptError(ValueError):
    """A prompt cannot be served; says why in its result."""


@dataclass(frozen=True)
class TextCodec:
    """Encodes prompts and decodes results; of its limits ``None`` is none."""

    tokenizer: PreTrainedTokenizerBase
    vocabulary: int  # tokens that the model knows
    context: int | None  # the context window
    max_prompt: int | None = None  # tokens of the longest prompt that the memory allows
    max_new_tokens: int = 1
    is_raw: bool = False  # whether texts are continued, not answered through the chat template

    @property
    def uses_template(self) -> bool:
        """Whether a text is a user's message for the model's chat template."""
        return not self.is_raw and bool(self.tokenizer.chat_template)

    def encode(self, prompt: Any) -> list[int]:
        """Encodes a text or messages; raises `PromptError` for what cannot be served."""
        tokens = self._tokens(prompt)
        if not tokens:
            raise PromptError("the prompt has no tokens for this model; give some text")
        if max(tokens) >= self.vocabulary:
            raise PromptError(
                f"the tokenizer gives token {max(tokens)}, but the model knows only"
                f" {self.vocabulary}; get the model again, with its own tokenizer"
            )
        if self.context is not None and len(tokens) >= self.context:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, but the model's context is {self.context};"
                f" shorten it to {self.context - 1} or fewer"
            )
        if self.max_prompt is not None and len(tokens) > self.max_prompt:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, and the memory that was promised is enough"
                f" for {self.max_prompt}; shorten it or give more --memory"
            )
        return tokens

    def sequence(self, line: ParsedLine) -> BatchSequence:
        """Encodes a prompt, with as many new tokens as the context window has room for."""
        prompt_id, prompt, found = line
        tokens = self.encode(prompt)
        left = self.max_new_tokens
        if self.context is not None:
            left = min(left, self.context - len(tokens))
        return BatchSequence(prompt_id, tokens, left, found, left < self.max_new_tokens)

    def record(self, sequence: BatchSequence) -> dict[str, Any]:
        """A finished sequence's result; its text has the space that follows the prompt."""
        text = Detokenizer(self.tokenizer, sequence.prompt)
        return {
            "id": sequence.id,
            "text": text.add(sequence.new_tokens) + text.end(),
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt),
            "new_tokens": len(sequence.new_tokens),
            "prompt_digest": sequence.digest,
        }

    def _tokens(self, prompt: Any) -> list[int]:
        is_templated = True
        if isinstance(prompt, str):
            _check_text(prompt)
            text, is_templated = prompt, self.uses_template
            prompt = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, list):
            raise PromptError(f"the prompt is not a text; write {_LINE}")
        elif self.is_raw:
            raise PromptError("messages need the chat template; leave out --raw, or give a prompt")
        if is_templated:
            try:
                text = chat_text(self.tokenizer, [_message(own) for own in prompt])
            except ChatTemplateError as error:
                raise PromptError(str(error).rstrip(".")) from error
        special = not (is_templated and self.tokenizer.chat_template)
        encoded = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return list(encoded["input_ids"])


def _message(message: Any) -> dict[str, str]:
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise PromptError(
            'a message is not {"role": "user", "content": "..."}, with role system, user or'
            " assistant; write it so"
        )
    _check_text(content)
    return {"role": role, "content": content}


def _check_text(text: str) -> None:
    if not text.strip():
        raise PromptError("the prompt is empty; give some text to go on from")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError("the prompt is not UTF-8 text; convert it to UTF-8") from None


def generate_records(
    lines: Iterable[ParsedLine], codec: TextCodec, runner: Runner
) -> Iterator[list[dict[str, Any]]]:
    """Generates for prompts; yields the results of each weight pass, refusals among them."""
    codec = replace(codec, max_prompt=runner.limits.longest_prompt)
    refused: list[dict[str, Any]] = []

    def sequences() -> Iterator[BatchSequence]:
        for line in lines:
            try:
                yield codec.sequence(line)
            except PromptError as error:
                refused.append({"id": line[0], "error": str(error), "prompt_digest": line[2]})

    for done in runner.run(sequences()):
        records = [*refused, *map(codec.record, done)]
        refused.clear()
        yield records
    yield refused


@dataclass
class Job:
    """The prompts that have no result yet, and where their results go."""

    prompts: PromptFile
    results: JobResultFile
    codec: TextCodec

    @property
    def num_finished(self) -> int:
        """Prompts that have a result, those of earlier runs included."""
        return len(self.results.finished)

    def unfinished(self) -> Iterator[PromptLine]:
        """The prompts that have no result."""
        for line in self.prompts.lines:
            if json.dumps(line.id) not in self.results.finished:
                yield line

    def read(self) -> Iterator[ParsedLine]:
        """Reads the prompts that have no result."""
        return map(self.prompts.read, self.unfinished())

    def summary(self) -> Summary:
        """What earlier runs have left to say."""
        return Summary(len(self.prompts), self.num_finished, self.results.num_errors)


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

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({**asdict(self), "tokens_per_second": self.tokens_per_second})

    def to_text(self) -> str:
        """One line."""
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
