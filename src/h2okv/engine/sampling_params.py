"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from h2okv.records import short_repr

MAX_LOGPROBS = 20
"""Alternatives that may be asked for with each token."""

UNLIMITED = 2**63 - 1
_GREEDY_BELOW = 1e-5
"""Colder than this, logits divided by the temperature overflow, and nothing is left to chance."""

_LIMITS: Mapping[str, tuple[type, float, float]] = {
    "max_tokens": (int, 0, UNLIMITED),
    "top_k": (int, 0, UNLIMITED),
    "n": (int, 1, UNLIMITED),
    "seed": (int, -math.inf, math.inf),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS),
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 1e-3, 1e6),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        max_tokens: The most new tokens; ``None`` for as many as the model's context leaves. 0 only
            reads the prompt.
        temperature: 0, or anything below 1e-5, takes the likeliest token (greedy) and becomes 0.
        top_p: Draws among the likeliest tokens that hold this much of the probability.
        top_k: Draws among so many of the likeliest tokens; 0 for all.
        min_p: Draws among tokens at least this likely, relative to the likeliest.
        repetition_penalty: Above 1 makes tokens of the prompt and the text less likely; from 0.001
            to 1e6.
        presence_penalty: Taken from the logits of tokens that the new text has.
        frequency_penalty: The same for every time that the new text has them.
        logit_bias: Added to the logits of these tokens, from -100 to 100.
        stop: A text, or several, that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, beside the model's own.
        ignore_eos: Whether the model's own end tokens do not end the output.
        n: How many outputs.
        seed: Of the random numbers, for the first of the ``n`` outputs, one more for each
            further one; ``None`` for numbers that nobody can foresee.
        logprobs: Tells the log-probability of each new token and of so many alternatives.
        prompt_logprobs: The same for the prompt's tokens.

    Raises:
        ValueError: If a value has the wrong type or makes no sense; whole numbers are taken for
            floats, and nothing else is converted.
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
        check_numbers(self, _LIMITS)
        if self.top_p == 0:
            raise ValueError("top_p=0 leaves no token to draw; give more than 0, at most 1.")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={short_repr(self.ignore_eos)} is neither True nor False.")
        own = vars(self)  # which is frozen for everybody else
        own["temperature"] = 0.0 if self.temperature < _GREEDY_BELOW else self.temperature
        own["stop"] = _listed("stop", self.stop, "a text, or a list of them")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"stop: {short_repr(text)} is not a text to stop at, and an empty text would"
                    " end every output; leave it out."
                )
        ends = _listed("stop_token_ids", self.stop_token_ids, "tokens")
        checked = (check_number("stop_token_ids", end, int, 0, UNLIMITED) for end in ends)
        own["stop_token_ids"] = tuple(checked)
        own["logit_bias"] = _biases(self.logit_bias)

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0


def check_number(name: str, value: Any, kind: type, least: float, most: float) -> Any:
    """Refuses what is not an int or float (no bool is) from ``least`` to ``most``; converts it."""
    is_number = isinstance(value, Integral if kind is int else Real)
    if not is_number or isinstance(value, bool):
        wanted = "a whole number; give an int" if kind is int else "a number; give a float"
        raise ValueError(f"{name}={short_repr(value)} is not {wanted}.")
    if not least <= value <= most:  # nor is NaN
        limits = f"a number from {least:g} to {most:g}"
        if most == UNLIMITED:
            limits = f"{least:g} or more, and less than 2**63"
        raise ValueError(f"{name}={short_repr(value)} is out of range; give {limits}.")
    return kind(value)


def check_numbers(settings: Any, limits: Mapping[str, tuple[type, float, float]]) -> None:
    """Checks and converts a frozen dataclass's fields; a default of ``None`` may stay."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None or getattr(type(settings), name) is not None:
            vars(settings)[name] = check_number(name, value, *limit)


def _listed(name: str, values: Any, wanted: str) -> tuple[Any, ...]:
    """What a list has in it, for which a text may stand alone."""
    listed = (values,) if isinstance(values, str) else values
    if not isinstance(listed, (list, tuple)):
        raise ValueError(f"{name}={short_repr(values)} is not a list; give {wanted}.")
    return tuple(listed)


def _biases(biases: Any) -> dict[int, float]:
    """What is added to the logits of which tokens."""
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias={short_repr(biases)} is not a mapping; give {{token: bias}}.")
    checked = {}
    for token, bias in biases.items():
        place = check_number("logit_bias: the token", token, int, 0, UNLIMITED)
        checked[place] = check_number(f"logit_bias[{place}]", bias, float, -100.0, 100.0)
    return checked
