"""Parameters of sampling, and of the end of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from h2okv.records import checked_arguments, short_repr

MAX_LOGPROBS = 20
"""Maximum number of alternatives with each token."""

UNLIMITED = 2**63 - 1
_GREEDY_BELOW = 1e-5
"""Below this, logits divided by the temperature overflow, and sampling is greedy anyway."""

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


@checked_arguments()
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, and conditions of its end.

    Attributes:
        max_tokens: Maximum number of new tokens; ``None`` for all that fit into the model's
            context. 0 only prefills the prompt.
        temperature: Sampling temperature; 0, or anything below 1e-5, is greedy and becomes 0.
        top_p: Nucleus sampling: most likely tokens of this total probability.
        top_k: Number of the most likely tokens to sample from; 0 for all.
        min_p: Minimum probability of a token, relative to the most likely one.
        repetition_penalty: Above 1 makes tokens of the prompt and the text less likely; from 0.001
            to 1e6. 1 adds no penalty, whatever the model's ``generation_config`` has.
        presence_penalty: Subtracted from the logits of tokens in the new text.
        frequency_penalty: Subtracted from them once for each occurrence in the new text.
        logit_bias: Added to the logits of these tokens, from -100 to 100.
        stop: One or more texts that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, in addition to the model's end tokens.
        ignore_eos: Whether to continue after the model's end tokens.
        n: Number of outputs.
        seed: Random seed of the first of the ``n`` outputs, one more for each further one; ``None``
            for an unpredictable one.
        logprobs: Number of alternatives returned with the log-probability of each new token;
            ``None`` for no log-probabilities.
        prompt_logprobs: Likewise for the prompt's tokens.
        skip_special_tokens: Whether the text leaves out special tokens.
        grammar: A grammar, in the Lark syntax of llguidance, that outputs follow up to their end
            token, such as ``h2okv.engine.structured.json_grammar(schema)``; ``None`` for any text.

    Raises:
        ValueError: If a value has the wrong type or is out of range; integers are converted to
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
    skip_special_tokens: bool = True
    grammar: str | None = None

    def __post_init__(self) -> None:
        check_numbers(self, _LIMITS)
        if self.top_p == 0:
            raise ValueError("top_p=0 leaves no token to draw; give more than 0, at most 1.")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                value = short_repr(getattr(self, name))
                raise ValueError(f"{name} must be True or False, got {value}.")
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise ValueError(f"grammar must be a text, got {short_repr(self.grammar)}.")
        fields = vars(self)  # the dataclass is frozen
        fields["temperature"] = 0.0 if self.temperature < _GREEDY_BELOW else self.temperature
        fields["stop"] = _listed("stop", self.stop, "a text, or a list of them")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"stop: {short_repr(text)} is not a text to stop at, and an empty text would"
                    " end every output; leave it out."
                )
        ends = _listed("stop_token_ids", self.stop_token_ids, "tokens")
        checked = (check_number("stop_token_ids", end, int, 0, UNLIMITED) for end in ends)
        fields["stop_token_ids"] = tuple(checked)
        fields["logit_bias"] = _biases(self.logit_bias)

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0


def check_number(name: str, value: Any, kind: type, minimum: float, maximum: float) -> Any:
    """Return an int or float in ``[minimum, maximum]`` as ``kind``; raise ValueError otherwise.

    A bool is not a number here.
    """
    is_number = isinstance(value, Integral if kind is int else Real)
    if not is_number or isinstance(value, bool):
        expected = "a whole number; give an int" if kind is int else "a number; give a float"
        raise ValueError(f"{name}={short_repr(value)} is not {expected}.")
    if not minimum <= value <= maximum:  # false for NaN too
        limits = f"a number from {minimum:g} to {maximum:g}"
        if maximum == UNLIMITED:
            limits = f"{minimum:g} or more, and less than 2**63"
        raise ValueError(f"{name}={short_repr(value)} is out of range; give {limits}.")
    return kind(value)


def check_numbers(settings: Any, limits: Mapping[str, tuple[type, float, float]]) -> None:
    """Check and convert fields of a frozen dataclass; a default of ``None`` may stay."""
    for name, bounds in limits.items():
        value = getattr(settings, name)
        if value is not None or getattr(type(settings), name) is not None:
            vars(settings)[name] = check_number(name, value, *bounds)


def _listed(name: str, values: Any, expected: str) -> tuple[Any, ...]:
    """Return a list's elements, or a single text, as a tuple; raise ValueError otherwise."""
    listed = (values,) if isinstance(values, str) else values
    if not isinstance(listed, (list, tuple)):
        raise ValueError(f"{name}={short_repr(values)} is not a list; give {expected}.")
    return tuple(listed)


def _biases(biases: Any) -> dict[int, float]:
    """Return checked biases by token; raise ValueError if one is invalid."""
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias={short_repr(biases)} is not a mapping; give {{token: bias}}.")
    checked = {}
    for token, bias in biases.items():
        index = check_number("logit_bias: the token", token, int, 0, UNLIMITED)
        checked[index] = check_number(f"logit_bias[{index}]", bias, float, -100.0, 100.0)
    return checked
