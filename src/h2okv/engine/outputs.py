"""What a request returns, how it fails, and what the engine counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenLogprob:
    """A token that was chosen, or that the prompt has, and how likely it was."""

    token: int
    logprob: float  # after all tokens before it, without temperature or penalties
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with theirs, if asked for


@dataclass(frozen=True)
class PromptRead:
    """What is known when a prompt has been read."""

    token_ids: tuple[int, ...]
    num_reused: int = 0  # tokens that came from a saved prefix
    # If asked for: one for each token, None for the first one.
    logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True)
class KeptTokens:
    """What the cache of one output still holds of the tokens that it has seen."""

    counts: tuple[int, ...]  # for each token, how many KV heads of all layers hold it
    num_heads: int  # how many there are
    cache_bytes: int  # of what is held, scores and positions included
    full_bytes: int  # of the keys and values that a full cache would hold


@dataclass(frozen=True)
class OutputDelta:
    """What a step of the engine adds to one output of a request."""

    index: int  # which of the ``n`` outputs
    text: str  # may be empty, while a character or a stop text is incomplete
    # Those of a stop text or an end token are among them, though their text is not.
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each new token, if asked for
    finish_reason: str | None = None  # "stop" or "length" with the last delta of an output
    # The stop text, or the token of `SamplingParams.stop_token_ids`, that ended it.
    stop_reason: str | int | None = None
    prompt: PromptRead | None = None  # with the first delta of a request
    # If asked for, from the second token on: what the cache held before the newest token.
    kept: KeptTokens | None = None


@dataclass
class Completion:
    """One of the ``n`` outputs of a request, put together of its `OutputDelta` s."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    kept: KeptTokens | None = None  # the newest

    def add(self, delta: OutputDelta) -> None:
        """Takes the next delta of this output; mutates it."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.kept = delta.kept or self.kept


@dataclass
class RequestOutput:
    """All that a finished request got."""

    prompt: PromptRead
    completions: list[Completion]  # the ``n`` outputs, by index

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.completions[0].text


class QueueFullError(RuntimeError):
    """As many requests wait as may; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting, which is the limit; try again in {retry_after:.0f} s."
        )
        self.retry_after = retry_after


class RequestFailedError(RuntimeError):
    """Something went wrong with this request alone, such as logits that are not numbers."""

    # Where `LLM.generate` raises it: of all its prompts, `None` for each one that failed.
    outputs: Sequence[RequestOutput | None] = ()


class EngineStoppedError(RuntimeError):
    """The engine is shutting down, or has stopped by an error of its own."""


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the model or the engine takes."""


def _number(meaning: str, is_counter: bool = False) -> Any:
    """A field of `EngineStats` with what ``/metrics`` says of it."""
    return field(default=0, metadata={"meaning": meaning, "is_counter": is_counter})


@dataclass
class EngineStats:
    """What the engine holds now, and what it has done since it was made."""

    max_num_seqs: int = _number("Sequences that can decode at the same time.")
    running: int = _number("Sequences that decode.")
    waiting: int = _number("Requests that have not begun.")
    cache_bytes: int = _number("Bytes of the cache entries that are held now.")
    full_bytes: int = _number("Bytes that a full cache would hold for the same tokens.")
    reserved_bytes: int = _number("Bytes of all slots, in use or not.")
    prompt_tokens: int = _number("Tokens of prompts that were read, without reused ones.", True)
    reused_tokens: int = _number("Tokens of prompts that came from a saved prefix.", True)
    new_tokens: int = _number("Tokens that were generated.", True)
    finished: int = _number("Requests to the engine that ended well.", True)
    failed: int = _number("Requests to the engine that ended with an error.", True)
    aborted: int = _number("Requests to the engine whose client went away.", True)
    steps: int = _number("Decode steps.", True)
    evictions: int = _number("Entries evicted, of one layer and one KV head.", True)
