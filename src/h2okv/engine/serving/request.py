"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from h2okv.engine.detokenizer import Detokenizer
from h2okv.engine.serving.outputs import Piece, PromptRead, TokenLogprob
from h2okv.engine.serving.plan import PromptStart
from h2okv.engine.serving.sampler import RowSampler
from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.engine.stop_text import StopText


class Output:
    """One of the outputs of a request.

    Args:
        request: Whose.
        index: Which of its ``n``.
        sampler: Chooses its tokens.
        tokenizer: Of the model.

    Attributes:
        tokens: What was generated.
        finish_reason: ``None`` while it goes on.
    """

    def __init__(
        self, request: Request, index: int, sampler: RowSampler, tokenizer: PreTrainedTokenizerBase
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
        """Takes the next token; mutates the output.

        Args:
            token: What was chosen.
            ends: Tokens that end the model's texts.
            logprobs: Of the token, if asked for.

        Returns:
            What the client gets.
        """
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
