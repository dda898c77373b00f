"""Results and errors of a request, and counters of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a sampled token or of a token of the prompt."""

    token: int
    logprob: float  # after all tokens before it, without temperature or penalties
    top: tuple[tuple[int, float], ...] = ()  # most likely tokens with theirs, if requested


@dataclass(frozen=True)
class PromptRead:
    """Properties of a prompt that has been prefilled."""

    token_ids: tuple[int, ...]
    num_reused: int = 0  # tokens that came from a saved prefix
    # If requested: one for each token, None for the first one.
    logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True)
class KeptTokens:
    """Which tokens the cache of one output still holds."""

    counts: tuple[int, ...]  # for each token, the number of KV heads of all layers that hold it
    num_heads: int  # KV heads of all layers
    cache_bytes: int  # of the entries, scores and positions included
    full_bytes: int  # of the keys and values of a full cache


@dataclass(frozen=True)
class VerifiedAnswer:
    """An answer that was read again with the full cache, token by token.

    Attributes:
        tokens: Tokens of the answer that were compared; 0 if it could not be read again.
        agreed: Those of which the most likely token was the full cache's.
        first_difference: Number of the first that was not, from 0; ``None`` if all agreed.
        kl_divergence: Of the evicting cache's next tokens from the full cache's, in nats, the mean
            over the tokens; of the 16 most likely next tokens and all others as one.
        note: Why less than the whole answer was compared, or it was not repaired.
        repaired: Whether an earlier answer differed, and this one is the full cache's.
        repair_tokens: Tokens that were read and written for it.
    """

    tokens: int
    agreed: int
    first_difference: int | None = None
    kl_divergence: float = 0.0
    note: str = ""
    repaired: bool = False
    repair_tokens: int = 0

    @property
    def agreement(self) -> float | None:
        """Share of the tokens that agreed; ``None`` of none."""
        return self.agreed / self.tokens if self.tokens else None

    def __str__(self) -> str:
        if not self.tokens:
            return self.note
        text = f"{self.agreed:,} of {self.tokens:,} next tokens are the full cache's"
        if self.first_difference is not None:
            text += f", the first that differs is number {self.first_difference}"
        if self.repaired:
            text += "; it was written again by the full cache"
        return f"{text} ({self.note})" if self.note else text

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        figures = {**vars(self), "agreement": self.agreement}
        unset = {"note": "", "repaired": False, "repair_tokens": 0}
        return {n: value for n, value in figures.items() if n not in unset or value != unset[n]}


@dataclass(frozen=True)
class OutputDelta:
    """Part of one output of a request that a step of the engine adds."""

    index: int  # which of the ``n`` outputs
    text: str  # may be empty, while a character or a stop text is incomplete
    # Tokens of a stop text and end tokens are included, their text is not.
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each new token, if requested
    finish_reason: str | None = None  # "stop" or "length" with the last delta of an output
    # The stop text, or the token of `SamplingParams.stop_token_ids`, that ended it.
    stop_reason: str | int | None = None
    prompt: PromptRead | None = None  # with the first delta of a request
    # If requested, from the second token on: the cache before the newest token.
    kept: KeptTokens | None = None  # word-ok: goes with the public parameter kept_every
    # If requested, in one more delta at the end, without text.
    verified: VerifiedAnswer | None = None
    reasoning: str = ""  # thoughts, of chats whose template has them; not in the text
    reasoning_tokens: int = 0


@dataclass
class Completion:
    """One of the ``n`` outputs of a request, assembled from its `OutputDelta` s."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    kept: KeptTokens | None = None  # word-ok: the newest
    reasoning: str = ""
    reasoning_tokens: int = 0

    def add(self, delta: OutputDelta) -> None:
        """Add the next delta of this output; mutates the completion."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.reasoning_tokens += delta.reasoning_tokens
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.kept = delta.kept or self.kept  # word-ok


@dataclass
class RequestOutput:
    """The outputs of a finished request."""

    prompt: PromptRead
    completions: list[Completion]  # the ``n`` outputs, by index
    verified: VerifiedAnswer | None = None  # the first output, if it was read again

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.completions[0].text


class QueueFullError(RuntimeError):
    """The queue of waiting requests is full; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting, which is the limit; try again in {retry_after:.0f} s."
        )
        self.retry_after = retry_after


class RequestFailedError(RuntimeError):
    """One request failed, for example by logits that are not numbers."""

    # From `LLM.generate`: the outputs of all prompts, `None` for each one that failed.
    outputs: Sequence[RequestOutput | None] = ()


class GrammarTooLargeError(RequestFailedError):
    """The grammar of a request needs more states than are computed for one."""


class EngineStoppedError(RuntimeError):
    """The engine is shutting down, or has stopped by an error."""


def _number(meaning: str, is_counter: bool = False) -> Any:
    """Return a field of `EngineStats` with its help text in ``/metrics``."""
    return field(default=0, metadata={"meaning": meaning, "is_counter": is_counter})


@dataclass
class EngineStats:
    """Present state of the engine, and counters since it was created."""

    max_num_seqs: int = _number("Sequences that can decode at the same time.")
    running: int = _number("Sequences that decode.")
    waiting: int = _number("Requests that have not begun.")
    cache_bytes: int = _number("Bytes of the cache entries that are held now.")
    full_bytes: int = _number("Bytes that a full cache would hold for the same tokens.")
    reserved_bytes: int = _number("Bytes of the slots allocated so far, in use or not.")
    prompt_tokens: int = _number("Tokens of prompts that were read, without reused ones.", True)
    reused_tokens: int = _number("Tokens of prompts that came from a saved prefix.", True)
    prefix_hits: int = _number("Prompts that continued from a saved state.", True)
    prefix_states: int = _number("States of prefixes that are saved now.")
    prefix_bytes: int = _number("Bytes of these states.")
    prefix_evictions: int = _number("States that were dropped for newer ones.", True)
    prefix_disk_states: int = _number("States in the files of the prefix cache's folder.")
    prefix_disk_bytes: int = _number("Bytes of these files.")
    prefix_disk_hits: int = _number("States that prompts brought back from a file.", True)
    new_tokens: int = _number("Tokens that were generated.", True)
    finished: int = _number("Requests to the engine that ended well.", True)
    failed: int = _number("Requests to the engine that ended with an error.", True)
    aborted: int = _number("Requests to the engine whose client went away.", True)
    verified: int = _number("Answers that were read again with the full cache.", True)
    verified_tokens: int = _number("Tokens of prompts and answers read again.", True)
    verify_failed: int = _number("Answers that could not be read again.", True)
    verify_waiting: int = _number("Answers that are still to be read again.")
    repaired: int = _number("Answers that were replaced by the full cache's.", True)
    repair_tokens: int = _number("Tokens that were read and written for these.", True)
    steps: int = _number("Decode steps.", True)
    evictions: int = _number("Entries evicted, of one layer and one KV head.", True)
