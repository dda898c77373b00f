"""What a request returns, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenLogprob:
    """A token and how likely it was.

    Attributes:
        token: The token that was chosen, or that the prompt has.
        logprob: Its log-probability after all tokens before it, without temperature or penalties.
        top: The likeliest tokens with theirs, as many as were asked for, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptRead:
    """What is known when a prompt has been read.

    Attributes:
        token_ids: The prompt.
        num_reused: How many of its tokens came from a saved prefix.
        logprobs: If asked for: one for each token, ``None`` for the first one.
    """

    token_ids: tuple[int, ...]
    num_reused: int = 0
    logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True)
class OutputDelta:
    """What a step of the engine adds to one output of a request.

    Attributes:
        index: Which of the ``n`` outputs.
        text: New text; may be empty, while a character or a stop text is incomplete.
        token_ids: New tokens. Those of a stop text or an end token are among them, though their
            text is not.
        logprobs: One for each new token, if asked for.
        finish_reason: ``"stop"`` or ``"length"`` with the last delta of an output.
        stop_reason: The stop text, or the token of `SamplingParams.stop_token_ids`, that ended it.
        prompt: With the first delta of a request.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt: PromptRead | None = None


@dataclass
class Completion:
    """One finished output.

    Attributes:
        index: Which of the ``n`` outputs.
        text: The text, without stop text.
        token_ids: Its tokens.
        logprobs: One for each token, if asked for.
        finish_reason: ``"stop"`` (an end token or a stop text) or ``"length"``.
        stop_reason: See `OutputDelta`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Takes the next delta of this output; mutates it."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class RequestOutput:
    """All that a finished request got.

    Attributes:
        prompt: What was read.
        completions: The ``n`` outputs, by index.
    """

    prompt: PromptRead
    completions: list[Completion]

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.completions[0].text


class QueueFullError(RuntimeError):
    """As many requests wait as may.

    Attributes:
        retry_after: Seconds after which there is probably room.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting, which is the limit; try again in {retry_after:.0f} s."
        )
        self.retry_after = retry_after


class RequestFailedError(RuntimeError):
    """Something went wrong with this request alone, such as logits that are not numbers."""


class EngineStoppedError(RuntimeError):
    """The engine is shutting down, or has stopped by an error of its own."""


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the model or the engine takes."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; counters only grow.

    Attributes:
        max_num_seqs: Sequences that can decode at the same time.
        running: Sequences that decode.
        waiting: Requests that have not begun.
        prompt_tokens: Counter: tokens of prompts that were read, without reused ones.
        reused_tokens: Counter: tokens of prompts that came from a saved prefix.
        new_tokens: Counter: tokens that were generated.
        finished: Counter: requests that ended well.
        failed: Counter: requests that ended with an error.
        aborted: Counter: requests whose client went away.
        steps: Counter: decode steps.
        evictions: Counter: entries evicted, of one layer and one KV head.
        cache_bytes: Bytes of the entries that are held now.
        full_bytes: Bytes that a full cache would hold for the same tokens.
        reserved_bytes: Bytes of all slots, in use or not.
    """

    max_num_seqs: int
    running: int
    waiting: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    finished: int
    failed: int
    aborted: int
    steps: int
    evictions: int
    cache_bytes: int
    full_bytes: int
    reserved_bytes: int
