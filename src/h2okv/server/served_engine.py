"""What the server asks of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from h2okv.config import Budget
from h2okv.engine.serving.outputs import Piece
from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.engine.serving.stats import EngineStats


class ServedEngine(Protocol):
    """An engine that generates for many requests at once, such as `h2okv.AsyncLLM`."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    @property
    def max_context(self) -> int | None:
        """The most tokens of a prompt and its output together; ``None`` for no limit."""

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens of a prompt."""

    @property
    def row_budget(self) -> int:
        """The largest budget of a request, in tokens."""

    @property
    def is_healthy(self) -> bool:
        """Whether it takes requests."""

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, *, budget: Budget | None = None
    ) -> AsyncIterator[Piece]:
        """Generates; closing the iterator ends the request."""

    def stats(self) -> EngineStats:
        """Returns what it is doing."""

    async def aclose(self, drain: float = 30.0) -> None:
        """Takes no more requests, and ends when those that run have finished."""
