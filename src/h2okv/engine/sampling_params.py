"""Parameters of sampling, and of the end of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from h2okv.prompts import readers
from h2okv.prompts.readers import UNLIMITED, FieldError, Path, Reader
from h2okv.records import checked_arguments, short_repr

MAX_LOGPROBS = 20
"""Maximum number of alternatives with each token."""

_GREEDY_BELOW = 1e-5
"""Below this, logits divided by the temperature overflow, and sampling is greedy anyway."""


def _read_temperature(value: Any, path: Path) -> float:
    temperature: float = readers.number(0, 100)(value, path)
    return 0.0 if temperature < _GREEDY_BELOW else temperature


def _read_top_p(value: Any, path: Path) -> float:
    top_p: float = readers.number(0, 1)(value, path)
    if not top_p:
        raise FieldError(path, "=0 leaves no token to draw; give more than 0, at most 1")
    return top_p


def _read_biases(value: Any, path: Path) -> dict[int, float]:
    """Read biases by token; in JSON a key is a string."""
    if not isinstance(value, Mapping):
        raise readers.unlike("an object of biases by token", value, path)
    biases = {}
    for key, bias in value.items():
        is_text = isinstance(key, str) and key.isdecimal() and len(key) <= 18
        token = int(key) if is_text else key
        is_token = isinstance(token, Integral) and not isinstance(token, bool)
        if not is_token or not 0 <= token <= UNLIMITED:
            problem = f" has the key {short_repr(key)}, which is not a token; give its number"
            raise FieldError(path, problem)
        biases[int(token)] = readers.number(-100, 100)(bias, (*path, int(token)))
    return biases


SAMPLING: Mapping[str, Reader] = {
    "max_tokens": readers.integer(0),
    "temperature": _read_temperature,
    "top_p": _read_top_p,
    "top_k": lambda value, path: max(0, readers.integer(-1)(value, path)),  # -1: all, as in vLLM
    "min_p": readers.number(0, 1),
    "repetition_penalty": readers.number(1e-3, 1e6),
    "presence_penalty": readers.number(-2, 2),
    "frequency_penalty": readers.number(-2, 2),
    "logit_bias": _read_biases,
    "stop": readers.one_or_more(readers.name, limit=64),
    "stop_token_ids": readers.list_of(readers.integer(0), "a list of tokens", limit=1024),
    "ignore_eos": readers.boolean,
    "n": readers.integer(1),
    "seed": readers.integer(-math.inf, math.inf),
    "logprobs": readers.integer(0, MAX_LOGPROBS),
}
"""Readers of the fields of `SamplingParams` that requests have."""
_READERS = {
    **SAMPLING,
    "prompt_logprobs": SAMPLING["logprobs"],
    "skip_special_tokens": readers.boolean,
    "grammar": readers.text,
}


def sampling_values(read: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
    """Return a request's fields of `SamplingParams`, as their readers returned them."""
    values = {name: read[name] for name in SAMPLING if read.get(name) is not None}
    limit = read.get("max_completion_tokens")
    if limit is not None and values.setdefault("max_tokens", limit) != limit:
        problem = f"={values['max_tokens']} and max_completion_tokens={limit} contradict each other"
        raise FieldError((*path, "max_tokens"), f"{problem}; give one of them")
    return values


@checked_arguments()
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, and conditions of its end.

    Attributes:
        max_tokens: Maximum number of new tokens; ``None`` for all that fit into the model's
            context. 0 only prefills the prompt.
        temperature: Sampling temperature; 0, or anything below 1e-5, is greedy and becomes 0.
        top_p: Nucleus sampling: most likely tokens of this total probability.
        top_k: Number of the most likely tokens to sample from; 0 or -1 for all.
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
        FieldError: If a value has the wrong type or is out of range; it is a `ValueError`. Integers
            are converted to floats, and 8.0 to 8, as requests in JSON have them.
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
        readers.check_settings(self, _READERS)
        for name in ("stop", "stop_token_ids"):
            vars(self)[name] = tuple(getattr(self, name))

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0
