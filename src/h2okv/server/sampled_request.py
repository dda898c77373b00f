"""The fields that chats and completions have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from h2okv.config import Budget
from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.server.api_error import ApiError
from h2okv.server.settings import ServerSettings

_MOST_STOPS = 64
_MOST_STOP_TOKENS = 1024
_SEEDS = 2**63
_TOKEN_DIGITS = 18
_SHOWN = 60
"""Characters of a wrong key that an error repeats."""
_NAME = re.compile(r"(\w+)[\[=:]")

REFUSED: Mapping[str, str] = {
    "tools": "this server calls no tools; leave it out",
    "tool_choice": "this server calls no tools; leave it out",
    "functions": "this server calls no functions; leave it out",
    "function_call": "this server calls no functions; leave it out",
    "audio": "this server writes text only; leave it out",
    "web_search_options": "this server searches nothing; leave it out",
    "reasoning_effort": "this server has no such setting; leave it out",
    "verbosity": "this server has no such setting; leave it out",
    "suffix": "this server only continues a prompt; leave it out",
    "response_format": "this server writes plain text; leave it out, or give {'type': 'text'}",
    "modalities": "this server writes text only; leave it out, or give ['text']",
}
"""Fields of OpenAI's that ask for what there is not, each with its remedy."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values of these fields that change nothing."""


class Strict(BaseModel):
    """A part of a request: unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream says beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class BudgetChoice(Strict):
    """The cache budget of one request; what is left out is the server's."""

    heavy: int | float | None = None
    recent: int | float | None = None
    sink: int | None = None

    def budget(self, standard: Budget) -> Budget:
        """Makes the budget.

        Args:
            standard: The server's.

        Returns:
            The budget.

        Raises:
            ApiError: If it makes no sense.
        """
        given = self.model_dump(exclude_none=True)
        parts = {"heavy": standard.heavy, "recent": standard.recent, "sink": standard.sink}
        try:
            return Budget(**{**parts, **given})
        except ValueError as error:
            raise ApiError(400, f"h2o: {error}", param="h2o", code="invalid_value") from error


class SampledRequest(Strict):
    """What chats and completions have in common.

    `null` is the same as leaving a field out, as clients of OpenAI's API expect.
    """

    default_max_tokens: ClassVar[int | None] = None

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # As vLLM's server takes them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    # This server's own.
    h2o: BudgetChoice | None = None
    # Taken, and of no effect here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator(*REFUSED, mode="after", check_fields=False)
    @classmethod
    def _refused(cls, value: Any, info: Any) -> Any:
        name = info.field_name
        if value is not None and value not in _HARMLESS.get(name, ()):
            shown = repr(value)
            shown = shown if len(shown) < 60 else shown[:60] + "..."
            raise ValueError(f"{name}={shown}: {REFUSED[name]}.")
        return value

    @model_validator(mode="after")
    def _together(self) -> SampledRequest:
        if self.stream_options is not None and not self.stream:
            raise field_error(
                "stream_options", "stream_options needs stream=true; set it, or leave this out."
            )
        for name, value, most in (
            ("stop", self.stop, _MOST_STOPS),
            ("stop_token_ids", self.stop_token_ids, _MOST_STOP_TOKENS),
        ):
            if len(value or ()) > most:
                raise field_error(
                    name, f"{name} has {len(value or ())} entries; give {most} at most."
                )
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, settings: ServerSettings, **further: Any) -> SamplingParams:
        """Makes what the engine takes, but for the number of tokens.

        Args:
            settings: The server's limits.
            **further: What only one kind of request has; ``max_tokens`` is among it.

        Returns:
            The parameters.

        Raises:
            ApiError: If a value is out of range.
        """
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "n": self.n,
            "stop": self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if self.logit_bias is None else _biases(self.logit_bias),
            # In vLLM's requests -1 stands for all tokens.
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "seed": None if self.seed is None else self.seed % _SEEDS,
            **further,
        }
        most = settings.max_new_tokens
        wanted = values.get("max_tokens")
        if wanted is not None and wanted > most:
            raise ApiError(
                400,
                f"max_tokens={wanted} is more than this server writes; give {most} at most.",
                param="max_tokens",
                code="invalid_value",
            )
        try:
            return SamplingParams(**{k: v for k, v in values.items() if v is not None})
        except ValueError as error:
            found = _NAME.match(str(error))
            name = found.group(1) if found and found.group(1) in type(self).model_fields else None
            raise ApiError(400, str(error), param=name, code="invalid_value") from error


class FieldError(ValueError):
    """What is wrong with a field, found when all fields were there.

    Attributes:
        field: Its name.
    """

    field: str


def field_error(field: str, message: str) -> FieldError:
    """Makes the error of a field that does not fit to others."""
    error = FieldError(message)
    error.field = field
    return error


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Tokens, which are strings in JSON, as numbers."""
    found = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) <= _TOKEN_DIGITS):
            shown = token if len(token) <= _SHOWN else f"{token[:_SHOWN]}..."
            raise ApiError(
                400,
                f"logit_bias has the key {shown!r}, which is no token; give its number.",
                param="logit_bias",
                code="invalid_value",
            )
        found[int(token)] = bias
    return found
