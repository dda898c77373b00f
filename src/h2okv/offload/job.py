"""A job: a file of prompts in, a file of results out, resumable."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from h2okv.console import format_bytes
from h2okv.engine.detokenizer import Detokenizer
from h2okv.integration.chat_template import ChatTemplateError, chat_text
from h2okv.offload.batch_runner import BatchSequence, PromptId, Runner
from h2okv.provenance import digest
from h2okv.records import Record, ResultFile, file_error

_LINE = '{"id": 1, "prompt": "..."}'


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

    def read(self, line: PromptLine) -> Any:
        """Reads a prompt: a text, or a list of messages."""
        try:
            with self.path.open("rb") as file:
                file.seek(line.start)
                _, prompt, found = parse_line(file.read(line.size))
        except OSError as error:
            raise self._unreadable(error) from error
        except ValueError:
            found = ""
        if found != line.digest:
            raise ValueError(
                f"'{self.path}' has changed while it was read (id {json.dumps(line.id)}); leave it"
                " as it is during a job, and run the command again"
            )
        return prompt

    def _scan(self) -> Iterator[PromptLine]:
        known: dict[str, int] = {}
        start = 0
        try:
            with self.path.open("rb") as file:
                for number, data in enumerate(file, start=1):
                    if data.strip(b"\xef\xbb\xbf \t\r\n"):
                        yield self._parse(number, start, data, known)
                    start += len(data)
        except OSError as error:
            raise self._unreadable(error) from error

    def _parse(self, number: int, start: int, data: bytes, known: dict[str, int]) -> PromptLine:
        try:
            prompt_id, _, found = parse_line(data)
            name = json.dumps(prompt_id)
            if name in known:
                raise ValueError(
                    f"id {name} is that of line {known[name]} too; give every prompt an id of its"
                    " own"
                )
        except ValueError as error:
            raise ValueError(f"'{self.path}', line {number}: {error}") from error
        known[name] = number
        return PromptLine(prompt_id, start, len(data), found)

    def _unreadable(self, error: OSError) -> ValueError:
        return file_error(self.path, "read", error, "give a JSONL file with prompts")


def parse_line(data: bytes) -> tuple[PromptId, Any, str]:
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
        raise ValueError(f"id {json.dumps(prompt_id)} is no name; give a text or a whole number")
    if "prompt" in fields and "messages" in fields:
        raise ValueError("it has both prompt and messages; leave one of them out")
    prompt = fields.get("prompt", fields.get("messages"))
    if "messages" in fields and not isinstance(prompt, list):
        raise ValueError('messages are no list; write [{"role": "user", "content": "..."}]')
    return prompt_id, prompt, digest(json.dumps(prompt, sort_keys=True))


class JobResultFile(ResultFile):
    """A job's results; its settings are in a file beside it.

    Attributes:
        finished: The digest of each prompt that has a result, by its id as JSON.
        num_errors: Results that say why a prompt could not be served.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.finished: dict[str, str] = {}
        self.num_errors = 0
        super().__init__(path, "h2okv batch", settings=settings)

    def take(self, record: Record) -> None:
        """See `ResultFile.take`."""
        if not {"id", "prompt_digest"} <= record.fields.keys():
            raise ValueError(f"{record.place} is no result of {self.kind}; choose another file")
        self.finished[json.dumps(record.fields["id"])] = record.fields["prompt_digest"]
        self.num_errors += "error" in record.fields

    def check_prompts(self, lines: Sequence[PromptLine]) -> None:
        """Refuses results of other prompts."""
        digests = {json.dumps(line.id): line.digest for line in lines}
        for name, found in self.finished.items():
            if digests.get(name) != found:
                what = f"a result for another prompt with id {name}"
                if name not in digests:
                    what = f"a result for id {name}, which is not in the input"
                raise ValueError(
                    f"'{self.path}' has {what}; choose another file, or give the input that it was"
                    " begun with"
                )


class PromptList:
    """Prompts given as lines of a file."""

    def __init__(self, data: Sequence[bytes]) -> None:
        parsed = [parse_line(line) for line in data]
        self._prompts = [prompt for _, prompt, _ in parsed]
        self.lines: Sequence[PromptLine] = [
            PromptLine(prompt_id, index, len(data[index]), found)
            for index, (prompt_id, _, found) in enumerate(parsed)
        ]

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, line: PromptLine) -> Any:
        """Returns a prompt."""
        return self._prompts[line.start]


class ResultList:
    """Results that somebody else writes."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.finished: dict[str, str] = {}
        self.num_errors = 0

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds results."""
        self.records.extend(records)


class PromptError(ValueError):
    """A prompt cannot be served; says why in its result."""


@dataclass(frozen=True)
class TextCodec:
    """Encodes prompts and decodes results.

    Attributes:
        tokenizer: The model's.
        vocabulary: Tokens that the model knows.
        context: The context window; ``None`` for no limit.
        max_prompt: The longest prompt that the memory allows, in tokens; ``None`` for no limit.
        is_raw: Whether texts are continued as they are, not answered through the chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    context: int | None
    max_prompt: int | None = None
    is_raw: bool = False

    @property
    def uses_template(self) -> bool:
        """Whether a text is a user's message for the model's chat template."""
        return not self.is_raw and bool(self.tokenizer.chat_template)

    def encode(self, prompt: Any) -> list[int]:
        """Encodes a text or messages.

        Raises:
            PromptError: If it is neither, is empty, or does not fit.
        """
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

    def decode(self, sequence: BatchSequence) -> str:
        """Decodes a sequence's new tokens, with the space that follows its prompt."""
        text = Detokenizer(self.tokenizer, sequence.prompt)
        return text.add(sequence.new_tokens) + text.end()

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            _check_text(prompt)
            if not self.uses_template:
                return self._encode(prompt, special=True)
            prompt = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, list):
            raise PromptError(f"the prompt is no text; write {_LINE}")
        elif self.is_raw:
            raise PromptError("messages need the chat template; leave out --raw, or give a prompt")
        try:
            text = chat_text(self.tokenizer, [_message(own) for own in prompt])
        except ChatTemplateError as error:
            raise PromptError(str(error).rstrip(".")) from error
        return self._encode(text, special=not self.tokenizer.chat_template)

    def _encode(self, text: str, special: bool) -> list[int]:
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


class Job:
    """The prompts that have no result yet, on their way through a `Runner`."""

    def __init__(
        self,
        prompts: PromptFile | PromptList,
        results: JobResultFile | ResultList,
        codec: TextCodec,
        max_new_tokens: int,
    ) -> None:
        self.prompts = prompts
        self.results = results
        self.codec = codec
        self.max_new_tokens = max_new_tokens
        self.num_skipped = len(results.finished)
        self._refused: list[dict[str, Any]] = []

    @property
    def num_finished(self) -> int:
        """Prompts that have a result, those of earlier runs included."""
        return len(self.results.finished)

    def run(self, runner: Runner) -> Iterator[int]:
        """Runs what is left; yields the number of finished prompts after each weight pass."""
        for done in runner.run(self._sequences()):
            self._append([self._record(sequence) for sequence in done])
            yield self.num_finished
        self._append([])

    def lengths(self) -> Iterator[int]:
        """Counts the tokens of each unfinished prompt that can be served."""
        for line in self.unfinished():
            try:
                yield len(self.codec.encode(self.prompts.read(line)))
            except PromptError:
                continue

    def unfinished(self) -> Iterator[PromptLine]:
        """The prompts that have no result."""
        for line in self.prompts.lines:
            if json.dumps(line.id) not in self.results.finished:
                yield line

    def _append(self, records: list[dict[str, Any]]) -> None:
        records, self._refused = [*self._refused, *records], []
        if records:
            self.results.append(records)

    def _sequences(self) -> Iterator[BatchSequence]:
        for line in self.unfinished():
            prompt = self.prompts.read(line)
            try:
                tokens = self.codec.encode(prompt)
            except PromptError as error:
                refused = {"id": line.id, "error": str(error), "prompt_digest": line.digest}
                self._refused.append(refused)
                continue
            left = self.max_new_tokens
            if self.codec.context is not None:
                left = min(left, self.codec.context - len(tokens))
            is_limited = left < self.max_new_tokens
            yield BatchSequence(line.id, tokens, left, line.digest, is_limited)

    def _record(self, sequence: BatchSequence) -> dict[str, Any]:
        return {
            "id": sequence.id,
            "text": self.codec.decode(sequence),
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt),
            "new_tokens": len(sequence.new_tokens),
            "prompt_digest": sequence.digest,
        }


@dataclass(frozen=True)
class Summary:
    """A finished job.

    Attributes:
        prompts: Of the whole job.
        skipped: Finished by an earlier run.
        errors: Results that are an error, those of earlier runs included.
        prompt_tokens: Of the prompts of this run.
        new_tokens: Generated in this run.
        passes: Weight passes.
        seconds: From the first weight pass to the last.
        predicted: New tokens per second that the plan expected; ``None`` without a plan.
        bytes_read: Weights read from the disk meanwhile.
        cache_bytes_read: Keys and values read from the file.
        wait_seconds: Time that computing waited for weights.
        plan: The plan by its fields; ``None`` without a plan.
        peak_bytes: Peak resident memory; ``None`` where it is unknown.
        data_bytes: The process's data at the end; ``None`` where it is unknown.
    """

    prompts: int
    skipped: int
    errors: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    predicted: float | None = None
    bytes_read: int = 0
    cache_bytes_read: int = 0
    wait_seconds: float = 0.0
    plan: dict[str, Any] | None = None
    peak_bytes: int | None = None
    data_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of this run, prefill included in the time."""
        return self.new_tokens / max(self.seconds, 1e-9)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({**asdict(self), "tokens_per_second": self.tokens_per_second})

    def to_text(self) -> str:
        """One line."""
        parts = [f"{self.prompts} prompts"]
        if self.skipped:
            parts.append(f"{self.skipped} of them finished before")
        if self.errors:
            parts.append(f"{self.errors} with an error record")
        parts.append(f"{self.new_tokens} new tokens in {self.seconds:.1f} s")
        speed = f"{self.tokens_per_second:,.1f} tokens/s"
        if self.predicted is not None:
            speed += f" ({self.predicted:,.1f} predicted)"
        parts.append(speed)
        if self.bytes_read:
            parts.append(f"{format_bytes(self.bytes_read)} of weights read")
        if self.peak_bytes is not None:
            parts.append(f"peak memory {format_bytes(self.peak_bytes)}")
        return ", ".join(parts)
