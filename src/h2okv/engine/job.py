"""A job: the prompts that are not finished yet, and where their results go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

from h2okv.engine.prompt_file import PromptLine
from h2okv.engine.runner import Runner
from h2okv.engine.sequence import Sequence


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
    decode: Callable[[Sequence], str]
    max_new_tokens: int
    context: int | None
    vocabulary: int
    most_prompt: int | None = None


class Job:
    """Goes through the prompts that have no result yet.

    Args:
        prompts: All prompts of the job.
        results: Results so far; mutated.
        wording: How text becomes tokens and back; may be replaced before the job runs.

    Raises:
        ValueError: If the results are of other prompts.
    """

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
        """Runs what is left.

        Args:
            runner: Generates.

        Yields:
            After every pass over the weights: finished prompts, all in all.

        Raises:
            ValueError: If the results cannot be written, or the prompts' file has changed.
        """
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

    def _sequences(self) -> Iterator[Sequence]:
        for line in self.unfinished():
            try:
                yield self._sequence(line, self.prompts.read(line))
            except _RefusedError as error:
                self._refused.append(
                    {"id": line.id, "error": str(error), "prompt_digest": line.digest}
                )

    def _sequence(self, line: PromptLine, prompt: Any) -> Sequence:
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
        return Sequence(line.id, tokens, room, line.digest, is_cut)

    def _record(self, sequence: Sequence) -> dict[str, Any]:
        return {
            "id": sequence.id,
            "text": self.wording.decode(sequence),
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt),
            "new_tokens": len(sequence.new_tokens),
            "prompt_digest": sequence.digest,
        }
