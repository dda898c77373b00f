"""A job: a file of prompts in, a file of results out, resumable."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from h2okv.offload.batch_runner import BatchSequence, PromptId, Runner


@dataclass(frozen=True)
class PromptLine:
    """Where a prompt stands in the file.

    Attributes:
        id: The prompt's name.
        start: Of its line, in bytes from the beginning of the file.
        size: Of its line, in bytes.
        digest: A short name of the line's prompt.
    """

    id: PromptId
    start: int
    size: int
    digest: str


class PromptFile:
    """Lines ``{"id": ..., "prompt": ...}``, looked through once and then read where needed.

    Only the ids are kept in memory. A line is checked against what was there at first, so that a
    file that changes meanwhile is noticed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = list(self._scan())
        if not self.lines:
            raise ValueError(
                f'\'{path}\' has no prompts; give lines such as {{"id": 1, "prompt": "..."}}'
            )

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, line: PromptLine) -> Any:
        """Reads a prompt."""
        try:
            with self.path.open("rb") as file:
                file.seek(line.start)
                _, prompt, digest = parse_line(file.read(line.size))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        except ValueError:
            digest = ""
        if digest != line.digest:
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
                        try:
                            prompt_id, _, digest = parse_line(data)
                        except ValueError as error:
                            raise ValueError(f"'{self.path}', line {number}: {error}") from error
                        name = json.dumps(prompt_id)
                        if name in known:
                            raise ValueError(
                                f"'{self.path}', line {number}: id {name} is that of line"
                                f" {known[name]} too; give every prompt an id of its own"
                            )
                        known[name] = number
                        yield PromptLine(prompt_id, start, len(data), digest)
                    start += len(data)
        except OSError as error:
            raise _unreadable(self.path, error) from error


def parse_line(data: bytes) -> tuple[PromptId, Any, str]:
    """Takes a line apart."""
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("this is not UTF-8 text; convert the file to UTF-8") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError('this is no JSON object; write {"id": 1, "prompt": "..."}')
    prompt_id = content.get("id")
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, (str, int)):
        raise ValueError(f"id {json.dumps(prompt_id)} is no name; give a text or a whole number")
    prompt = content.get("prompt")
    written = json.dumps(prompt, sort_keys=True).encode()
    return prompt_id, prompt, hashlib.sha256(written).hexdigest()[:16]


def _unreadable(path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(f"'{path}' cannot be read ({reason}); give a JSONL file with prompts")


_SETTINGS_SUFFIX = ".job.json"
Setting = str | int | float | None


class JobResultFile:
    """One line for each finished prompt, on the disk before the job goes on.

    The job's settings stand in a file beside it, so that results of two jobs do not mix. A line
    that was torn by a kill is dropped when the file is opened again.
    """

    def __init__(self, path: Path, settings: Mapping[str, Setting]) -> None:
        self.path = path
        self.settings_path = path.with_name(path.name + _SETTINGS_SUFFIX)
        self.finished: dict[str, str] = {}
        self.num_errors = 0
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = self._read_finished()
            if self._size:
                self._check_settings(settings)
            os.ftruncate(self._descriptor, self._size)
            if not self._size:
                self._write_settings(settings)
        except OSError as error:
            self.close()
            raise _unwritable(path, error) from error
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> JobResultFile:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; everything in it is on the disk already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def check_prompts(self, lines: Sequence[PromptLine]) -> None:
        """Refuses results that are of other prompts."""
        digests = {json.dumps(line.id): line.digest for line in lines}
        for name, digest in self.finished.items():
            if name not in digests:
                raise ValueError(
                    f"'{self.path}' has a result for id {name}, which is not in the input; give"
                    " another --output, or the input that it was begun with"
                )
            if digests[name] != digest:
                raise ValueError(
                    f"'{self.path}' has a result for another prompt with id {name}; give another"
                    " --output, or the input that it was begun with"
                )

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds results; they are on the disk when it returns."""
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        # Half of a pair of surrogates, which a tokenizer may give, is no UTF-8.
        encoded = data.encode("utf-8", errors="replace")
        try:
            written = 0
            while written < len(encoded):
                written += os.pwrite(
                    self._descriptor, memoryview(encoded)[written:], self._size + written
                )
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise _unwritable(self.path, error) from error
        self._size += len(encoded)
        for record in records:
            self.finished[json.dumps(record["id"])] = record["prompt_digest"]
            self.num_errors += "error" in record

    def _read_finished(self) -> int:
        """Notes the results that are there; returns their bytes, a torn last line left out."""
        size = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    break
                try:
                    record = json.loads(data)
                    name, digest = json.dumps(record["id"]), record["prompt_digest"]
                except (ValueError, TypeError, KeyError):
                    raise ValueError(
                        f"'{self.path}', line {number}, is no result of h2okv batch; give another"
                        " --output"
                    ) from None
                self.finished[name] = digest
                self.num_errors += "error" in record
                size += len(data)
            else:
                return size
            if not size and not self.settings_path.exists():
                # Nothing says that this text is ours to cut off.
                raise ValueError(
                    f"'{self.path}' is no result of h2okv batch; give another --output"
                )
        return size

    def _check_settings(self, settings: Mapping[str, Setting]) -> None:
        try:
            saved = json.loads(self.settings_path.read_text(encoding="utf-8"))
            before = dict(saved)
        except (OSError, ValueError, TypeError):
            raise ValueError(
                f"'{self.path}' has results, but '{self.settings_path.name}' beside it, which says"
                " what made them, cannot be read; give another --output"
            ) from None
        for name, value in settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"'{self.path}' was begun with {name} {before.get(name)}, not {value}; go on"
                    " with what it was begun with, or give another --output"
                )

    def _write_settings(self, settings: Mapping[str, Setting]) -> None:
        """Puts the settings on the disk, at once or not at all, before the first result."""
        draft = self.settings_path.with_name(self.settings_path.name + ".tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps(dict(settings), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.settings_path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _unwritable(path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(
        f"'{path}' cannot be written ({reason}); what was finished before is kept, and the same"
        " command goes on from there when there is room, or choose another --output"
    )


class Prompts(Protocol):
    """Where a job's prompts come from, such as a `PromptFile`."""

    @property
    def lines(self) -> SequenceOf[PromptLine]:
        """Names of all prompts."""

    def __len__(self) -> int: ...

    def read(self, line: PromptLine) -> Any:
        """Reads the prompt of one of `lines`."""


class Results(Protocol):
    """Where a job's results go, such as a `ResultFile`."""

    num_errors: int

    @property
    def finished(self) -> Mapping[str, str]:
        """The digest of each prompt that has a result, by its id as JSON."""

    def check_prompts(self, lines: SequenceOf[PromptLine]) -> None:
        """Refuses results that are of other prompts."""

    def append(self, records: SequenceOf[Mapping[str, Any]]) -> None:
        """Adds results."""


class _RefusedError(Exception):
    """A prompt cannot be served; says why."""


@dataclass(frozen=True)
class Wording:
    """How text becomes tokens and tokens become text.

    Attributes:
        encode: Gives a prompt's tokens.
        decode: Gives a finished sequence's text.
        max_new_tokens: The most tokens for a prompt.
        context: The most tokens of prompt and text together; ``None`` for no limit.
        vocabulary: Tokens that the model knows.
        most_prompt: The most tokens of a prompt that the memory allows; ``None`` for no limit.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[BatchSequence], str]
    max_new_tokens: int
    context: int | None
    vocabulary: int
    most_prompt: int | None = None


class Job:
    """Goes through the prompts that have no result yet."""

    def __init__(self, prompts: Prompts, results: Results, wording: Wording) -> None:
        results.check_prompts(prompts.lines)
        self.prompts = prompts
        self.results = results
        self.num_skipped = len(results.finished)
        self.wording = wording
        self._refused: list[dict[str, Any]] = []

    @property
    def num_finished(self) -> int:
        """Prompts that have a result, those of earlier runs too."""
        return len(self.results.finished)

    def run(self, runner: Runner) -> Iterator[int]:
        """Runs what is left."""
        for done in runner.run(self._sequences()):
            records = [self._record(sequence) for sequence in done]
            self._append(records)
            yield self.num_finished
        self._append([])

    def lengths(self) -> Iterator[int]:
        """Counts the tokens of each prompt that has no result and can be served."""
        for line in self.unfinished():
            try:
                yield len(self._sequence(line, self.prompts.read(line)).prompt)
            except _RefusedError:
                continue

    def unfinished(self) -> Iterator[PromptLine]:
        """Goes through the prompts that have no result."""
        for line in self.prompts.lines:
            if json.dumps(line.id) not in self.results.finished:
                yield line

    def _append(self, records: list[dict[str, Any]]) -> None:
        records, self._refused = [*self._refused, *records], []
        if records:
            self.results.append(records)

    def _sequences(self) -> Iterator[BatchSequence]:
        for line in self.unfinished():
            try:
                yield self._sequence(line, self.prompts.read(line))
            except _RefusedError as error:
                self._refused.append(
                    {"id": line.id, "error": str(error), "prompt_digest": line.digest}
                )

    def _sequence(self, line: PromptLine, prompt: Any) -> BatchSequence:
        """Checks a prompt and turns it into tokens; raises what its record shall say."""
        wording = self.wording
        if not isinstance(prompt, str):
            raise _RefusedError('the prompt is no text; write {"id": 1, "prompt": "..."}')
        if not prompt.strip():
            raise _RefusedError("the prompt is empty; give some text to go on from")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise _RefusedError("the prompt is not UTF-8 text; convert it to UTF-8") from None
        tokens = wording.encode(prompt)
        if not tokens:
            raise _RefusedError("the prompt has no tokens for this model; give some text")
        if max(tokens) >= wording.vocabulary:
            raise _RefusedError(
                f"the tokenizer gives token {max(tokens)}, but the model knows only"
                f" {wording.vocabulary}; get the model again, with its own tokenizer"
            )
        if wording.context is not None and len(tokens) >= wording.context:
            raise _RefusedError(
                f"the prompt has {len(tokens)} tokens, but the model's context is"
                f" {wording.context}; shorten it to {wording.context - 1} or fewer"
            )
        if wording.most_prompt is not None and len(tokens) > wording.most_prompt:
            raise _RefusedError(
                f"the prompt has {len(tokens)} tokens, and the memory that was promised is enough"
                f" for {wording.most_prompt}; shorten it or give more --memory"
            )
        room = wording.max_new_tokens
        if wording.context is not None:
            room = min(room, wording.context - len(tokens))
        is_cut = room < wording.max_new_tokens
        return BatchSequence(line.id, tokens, room, line.digest, is_cut)

    def _record(self, sequence: BatchSequence) -> dict[str, Any]:
        return {
            "id": sequence.id,
            "text": self.wording.decode(sequence),
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt),
            "new_tokens": len(sequence.new_tokens),
            "prompt_digest": sequence.digest,
        }


class PromptList:
    """Prompts that came as lines of a file."""

    def __init__(self, data: Sequence[bytes]) -> None:
        parsed = [parse_line(line) for line in data]
        self._prompts = [prompt for _, prompt, _ in parsed]
        self.lines = [
            PromptLine(prompt_id, index, len(data[index]), digest)
            for index, (prompt_id, _, digest) in enumerate(parsed)
        ]

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, line: PromptLine) -> Any:
        """Returns a prompt."""
        return self._prompts[line.start]


class ResultList:
    """Results that go elsewhere to be written."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.finished: dict[str, str] = {}
        self.num_errors = 0

    def check_prompts(self, lines: Sequence[PromptLine]) -> None:
        """Refuses nothing: there is no result yet."""

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds results."""
        self.records.extend(records)
        self.num_errors += sum("error" in record for record in records)
