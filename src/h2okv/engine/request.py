"""A request as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from transformers import PreTrainedTokenizerBase

from h2okv.engine.detokenizer import Detokenizer, StopText
from h2okv.engine.outputs import Piece, PromptRead, TokenLogprob
from h2okv.engine.sampler import Sampler
from h2okv.engine.sampling_params import SamplingParams


class Wanted(Enum):
    """Which logits of a piece of a prompt are asked for."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True)
class PromptStart:
    """How a prompt begins.

    Attributes:
        length: Tokens of all its pieces.
        budget: ``(heavy, recent, sink)`` of its own; ``None`` for the engine's.
        prefix: The saved prefix that it goes on from; ``None`` for none.
    """

    length: int
    budget: tuple[int | float, int | float, int] | None = None
    prefix: int | None = None


@dataclass(frozen=True)
class PromptPiece:
    """Some tokens of the prompt under way.

    Attributes:
        tokens: One or more.
        position: Of the first one, in the whole text.
        goes_on: Whether more of the prompt follows.
        start: With the first piece.
        wanted: Which logits.
    """

    tokens: tuple[int, ...]
    position: int
    goes_on: bool
    start: PromptStart | None = None
    wanted: Wanted = Wanted.NONE


@dataclass(frozen=True)
class Plan:
    """One step of the engine, in the order of the attributes.

    Attributes:
        leave: Rows to give back, one after the other; the last row takes each one's place.
        join: Of the prompts that have been read, the number of each one that gets a row; several
            times for several outputs.
        forget: Whether the prompts that were read, or are under way, are dropped (after joining).
        decode: The newest token of each row in use; empty for no decode step.
        positions: Theirs, in their texts.
        pieces: What is read: a piece of one prompt, or several whole prompts with one budget.
    """

    leave: tuple[int, ...] = ()
    join: tuple[int, ...] = ()
    forget: bool = False
    decode: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    pieces: tuple[PromptPiece, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        nothing = not self.leave and not self.decode and not self.pieces
        return nothing and not self.join and not self.forget


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

    def take(self, token: int, ends: frozenset[int], logprobs: tuple[TokenLogprob, ...]) -> Piece:
        """Takes the next token; mutates the output."""
        params = self.request.params
        self.tokens.append(token)
        stop_reason: str | int | None = None
        if token in params.stop_token_ids:
            self.finish_reason, stop_reason = "stop", token
        elif token in ends and not params.ignore_eos:
            self.finish_reason = "stop"
        else:
            self._stop_text.add(self._detokenizer.add([token]))
        if self.finish_reason is None and len(self.tokens) >= self.request.room:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._stop_text.stopped is None:
            self._stop_text.add(self._detokenizer.end())
            self._stop_text.end()
        if self._stop_text.stopped is not None:
            self.finish_reason, stop_reason = "stop", self._stop_text.stopped
        text = "".join(self._shown)
        self._shown.clear()
        return Piece(self.index, text, (token,), logprobs, self.finish_reason, stop_reason)


@dataclass(eq=False)
class Request:
    """A prompt, what is wanted of it, and how far it is.

    Attributes:
        prompt: Its tokens.
        params: What is asked for.
        room: The most new tokens of an output.
        start: How its prompt begins.
        num_reused: Tokens of the prompt that come from a saved prefix.
        notify: Called with each event of the request, in the engine's thread: a `Piece`, an
            exception, or ``None`` when all outputs are finished.
        num_read: Tokens of the prompt that the cache has seen.
        outputs: Once the prompt has been read, one for each of the ``n``.
        logprobs: Of the prompt's tokens so far, if asked for.
        is_over: Whether nothing more is done for it.
        is_alone: Whether its prompt is read by itself.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    room: int
    start: PromptStart
    num_reused: int
    notify: Callable[[Piece | Exception | None], None]
    num_read: int = 0
    outputs: list[Output] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    is_over: bool = False
    is_alone: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that it needs."""
        return self.params.n if self.room > 0 else 0

    @property
    def is_short(self) -> bool:
        """Whether others may be read in the same forward, if all are short enough."""
        special = self.is_alone or self.params.prompt_logprobs is not None
        return not special and self.start.budget is None and self.start.prefix is None

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt has been read."""
        return self.num_read == len(self.prompt)

    @property
    def is_finished(self) -> bool:
        """Whether all outputs are."""
        return all(own.finish_reason is not None for own in self.outputs)

    def prompt_read(self) -> PromptRead:
        """What the client is told of the prompt."""
        asked = self.params.prompt_logprobs is not None
        logprobs = tuple(self.logprobs) if asked else None
        return PromptRead(self.prompt, self.num_reused, logprobs)
