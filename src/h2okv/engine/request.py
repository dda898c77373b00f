"""Requests, their outputs, and what the scheduler tells the model runner to do for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from transformers import PreTrainedTokenizerBase

from h2okv.config import Budget
from h2okv.engine.detokenizer import Detokenizer, StopText
from h2okv.engine.outputs import OutputDelta, PromptRead, TokenLogprob
from h2okv.engine.sampler import Sampler
from h2okv.engine.sampling_params import SamplingParams


class LogitsMode(Enum):
    """Which logits of a chunk of a prompt are asked for."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True)
class PromptStart:
    """How a prompt begins.

    Attributes:
        length: Tokens of all its chunks.
        budget: Of its own; ``None`` for the engine's.
        prefix: The saved prefix that it goes on from; ``None`` for none.
    """

    length: int
    budget: Budget | None = None
    prefix: int | None = None


@dataclass(frozen=True)
class PrefillChunk:
    """Some tokens of a prompt.

    Attributes:
        tokens: One or more.
        position: Of the first one, in the whole text.
        is_last: Whether the prompt ends with it.
        start: With the first chunk.
        logits: Which of its logits are needed.
    """

    tokens: tuple[int, ...]
    position: int
    is_last: bool
    start: PromptStart | None = None
    logits: LogitsMode = LogitsMode.NONE


@dataclass(frozen=True)
class ScheduledStep:
    """One step of the engine, in the order of the attributes.

    Attributes:
        release: Sequences that give their slots back, one after the other; the last one takes each
            one's place.
        admit: Of the prompts that were prefilled, the number of each one that gets slots; several
            times for several outputs.
        drop: Whether the prompts that are prefilled, in whole or part, are dropped afterwards.
        decode: The newest token of each running sequence; empty for no decode step.
        positions: Theirs, in their texts.
        prefill: A chunk of one prompt, or several whole prompts with one budget.
    """

    release: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    drop: bool = False
    decode: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.release or self.admit or self.drop or self.decode or self.prefill)


class Output:
    """One of the outputs of a request.

    Attributes:
        tokens: What was generated.
        finish_reason: ``None`` while it goes on.
    """

    def __init__(
        self, request: Request, index: int, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.request = request
        self.index = index
        self.sampler = sampler
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._shown: list[str] = []
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stop_text = StopText(request.params.stop, self._shown.append, strips_start=False)

    def append(
        self, token: int, eos: frozenset[int], logprobs: tuple[TokenLogprob, ...]
    ) -> OutputDelta:
        """Takes the next token; mutates the output."""
        params = self.request.params
        self.tokens.append(token)
        stop_reason: str | int | None = None
        if token in params.stop_token_ids:
            self.finish_reason, stop_reason = "stop", token
        elif token in eos and not params.ignore_eos:
            self.finish_reason = "stop"
        else:
            self._stop_text.add(self._detokenizer.add([token]))
        if self.finish_reason is None and len(self.tokens) >= self.request.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._stop_text.stopped is None:
            self._stop_text.add(self._detokenizer.end())
            self._stop_text.end()
        if self._stop_text.stopped is not None:
            self.finish_reason, stop_reason = "stop", self._stop_text.stopped
        text = "".join(self._shown)
        self._shown.clear()
        return OutputDelta(self.index, text, (token,), logprobs, self.finish_reason, stop_reason)


@dataclass(eq=False)
class Request:
    """A prompt, what is wanted of it, and how far it is.

    Attributes:
        prompt: Its tokens.
        params: What is asked for.
        max_new_tokens: The most new tokens of an output.
        start: How its prompt begins.
        num_reused: Tokens of the prompt that come from a saved prefix.
        notify: Called with each event of the request, in the engine's thread: an `OutputDelta`, an
            exception, or ``None`` when all outputs are finished.
        num_prefilled: Tokens of the prompt that the cache has seen.
        outputs: Once the prompt is prefilled, one for each of the ``n``.
        logprobs: Of the prompt's tokens so far, if asked for.
        is_over: Whether nothing more is done for it.
        is_alone: Whether its prompt is prefilled by itself.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    start: PromptStart
    num_reused: int
    notify: Callable[[OutputDelta | Exception | None], None]
    num_prefilled: int = 0
    outputs: list[Output] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    is_over: bool = False
    is_alone: bool = False

    @property
    def num_seqs(self) -> int:
        """Sequences that it needs."""
        return self.params.n if self.max_new_tokens > 0 else 0

    @property
    def can_batch(self) -> bool:
        """Whether others may be prefilled in the same forward, if all are short enough."""
        special = self.is_alone or self.params.prompt_logprobs is not None
        return not special and self.start.budget is None and self.start.prefix is None

    @property
    def is_prefilled(self) -> bool:
        """Whether the cache has seen the whole prompt."""
        return self.num_prefilled == len(self.prompt)

    @property
    def is_finished(self) -> bool:
        """Whether all outputs are."""
        return all(own.finish_reason is not None for own in self.outputs)

    def prompt_read(self) -> PromptRead:
        """What the client is told of the prompt."""
        asked = self.params.prompt_logprobs is not None
        logprobs = tuple(self.logprobs) if asked else None
        return PromptRead(self.prompt, self.num_reused, logprobs)
