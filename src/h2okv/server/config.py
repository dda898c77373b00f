"""The server's settings."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from h2okv.config import Budget
from h2okv.engine.outputs import EngineStats, Piece
from h2okv.engine.sampling_params import SamplingParams

MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What is decided when the server starts.

    Attributes:
        model_name: What clients call the model.
        budget: Of requests that name none; ``{"h2o": {...}}`` changes parts of it.
        api_key: Asked of every request but ``/health`` and the pages; ``None`` for none.
        hosts: Names that the ``Host`` header may have; ``None`` for any.
        timeout: Seconds that a request may take, waiting included.
        max_body: Bytes of a request's body.
        max_new_tokens: The most new tokens that a request may ask for.
        max_choices: The most outputs of a request: prompts times ``n``.
        view_page: The HTML of a recorded viewer page, served at ``/view``.
    """

    model_name: str
    budget: Budget = field(default_factory=Budget)
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    timeout: float = 600.0
    max_body: int = 8 * MEBIBYTE
    max_new_tokens: int = 4096
    max_choices: int = 128
    view_page: str | None = None

    def __post_init__(self) -> None:
        """Checks all limits."""
        for name in ("timeout", "max_body", "max_new_tokens", "max_choices"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is too little; give more than 0.")
        if not math.isfinite(self.timeout):
            raise ValueError(f"timeout={self.timeout!r} is no time; give a number of seconds.")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; set one of some length, or none at all.")


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
