"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

MAX_LOGPROBS = 20
"""Alternatives that may be asked for with each token."""

_GREEDY_BELOW = 1e-5
"""Colder than this, logits divided by the temperature overflow, and nothing is left to chance."""
_LARGEST = 2**63 - 1
_SHOWN = 60
"""Characters of a wrong value that an error repeats."""

_INTEGERS: Mapping[str, tuple[float, float]] = {
    "max_tokens": (0, _LARGEST),
    "top_k": (0, _LARGEST),
    "n": (1, _LARGEST),
    "seed": (-math.inf, math.inf),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e6),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
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
        """Checks all values; whole numbers become floats, and lists tuples."""
        for name, (least, most) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, _integer(name, value, least, most))
        for name, limits in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), *limits))
        if self.top_p == 0:
            raise ValueError("top_p=0 leaves no token to draw; give more than 0, at most 1.")
        if self.temperature < _GREEDY_BELOW:
            self._set("temperature", 0.0)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={_shown(self.ignore_eos)} is neither True nor False.")
        self._set("stop", _texts(self.stop))
        if not isinstance(self.stop_token_ids, (list, tuple)):
            shown = _shown(self.stop_token_ids)
            raise ValueError(f"stop_token_ids={shown} is no list of tokens; give ints in a list.")
        ends = (_integer("stop_token_ids", own, 0, _LARGEST) for own in self.stop_token_ids)
        self._set("stop_token_ids", tuple(ends))
        self._set("logit_bias", _biases(self.logit_bias))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0


def _integer(name: str, value: Any, least: float, most: float) -> int:
    """An int within its range; a bool is none."""
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int:
        raise ValueError(f"{name}={_shown(value)} is not a whole number; give an int.")
    if not least <= value <= most:
        raise _out_of_range(name, value, least, most)
    return int(value)


def _number(name: str, value: Any, least: float, most: float) -> float:
    """A float within its range."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(f"{name}={_shown(value)} is not a number; give a float.")
    if not least <= value <= most:  # nor is NaN
        raise _out_of_range(name, value, least, most)
    return float(value)


def _out_of_range(name: str, value: Any, least: float, most: float) -> ValueError:
    limits = f"a number from {least:g} to {most:g}"
    if most == _LARGEST:
        limits = f"{least:g} or more, and less than 2**63"
    return ValueError(f"{name}={_shown(value)} is out of range; give {limits}.")


def _texts(stop: Any) -> tuple[str, ...]:
    """Stop texts, of which none is empty."""
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, (list, tuple)) or not all(isinstance(own, str) for own in texts):
        raise ValueError(f"stop={_shown(stop)} is no text; give a str, or a list of them.")
    if "" in texts:
        raise ValueError("stop: an empty text would end every output; leave it out.")
    return tuple(texts)


def _biases(biases: Any) -> dict[int, float]:
    """What is added to the logits of which tokens."""
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias={_shown(biases)} is no mapping; give {{token: bias}}.")
    return {
        _integer("logit_bias: the token", token, 0, _LARGEST): _number(
            f"logit_bias[{_shown(token)}]", bias, -100.0, 100.0
        )
        for token, bias in biases.items()
    }


def _shown(value: Any) -> str:
    """A value as an error repeats it: ints may have more digits than Python prints."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
