"""What a request asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_LOGPROBS = 20
"""Alternatives that may be asked for with each token."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        max_tokens: The most new tokens; ``None`` for as many as the model's context leaves. 0 only
            reads the prompt.
        temperature: 0 takes the likeliest token.
        top_p: Draws among the likeliest tokens that hold this much of the probability.
        top_k: Draws among so many of the likeliest tokens; 0 for all.
        min_p: Draws among tokens at least this likely, relative to the likeliest.
        repetition_penalty: Above 1 makes tokens of the prompt and the text less likely.
        presence_penalty: Taken from the logits of tokens that the new text has.
        frequency_penalty: The same for every time that the new text has them.
        logit_bias: Added to the logits of these tokens.
        stop: Texts that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, beside the model's own.
        ignore_eos: Whether the model's own end tokens do not end the output.
        n: How many outputs.
        seed: Of the random numbers, for the first of the ``n`` outputs, one more for each
            further one; ``None`` for numbers that nobody can foresee.
        logprobs: Tells the log-probability of each new token and of so many alternatives.
        prompt_logprobs: The same for the prompt's tokens.

    Raises:
        ValueError: If a value makes no sense.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Checks all values."""
        _check("max_tokens", self.max_tokens, 0, None)
        _check("temperature", self.temperature, 0, 100)
        _check("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p=0 leaves no token to draw; give more than 0, at most 1.")
        _check("top_k", self.top_k, 0, None)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0, None)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty=0 divides by nothing; give more than 0.")
        _check("presence_penalty", self.presence_penalty, -2, 2)
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        _check("n", self.n, 1, None)
        _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if "" in self.stop:
            raise ValueError("stop: an empty text would end every output; leave it out.")
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias[{token}]", bias, -100, 100)

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Whether the model's own likeliest token is the one."""
        return (
            self.is_greedy
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
        )


def _check(name: str, value: float | None, least: float, most: float | None) -> None:
    """Raises if a number is outside of its range."""
    if value is None:
        return
    is_fine = math.isfinite(value) and value >= least and (most is None or value <= most)
    if not is_fine:
        limits = f"{least} or more" if most is None else f"a number from {least} to {most}"
        raise ValueError(f"{name}={value!r} is out of range; give {limits}.")
