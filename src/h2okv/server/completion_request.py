"""The body of ``/v1/completions``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.server.sampled_request import SampledRequest, field_error
from h2okv.server.settings import ServerSettings


class CompletionRequest(SampledRequest):
    """A prompt or several, to be continued.

    Attributes:
        prompts: Each as text or as tokens.
    """

    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("prompt")
    @classmethod
    def _listed(cls, value: Any) -> list[str] | list[list[int]]:
        """Text, texts, tokens or lists of tokens, always as a list of prompts."""
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(isinstance(one, str) for one in value):
                return value
            if _are_tokens(value):
                return [value]
            if all(_are_tokens(one) for one in value):
                return value
        shown = repr(value)
        shown = shown if len(shown) < 60 else shown[:60] + "..."
        raise ValueError(
            f"prompt={shown} does not fit; give a text, a list of texts, a list of tokens or a list"
            " of lists of tokens, none of the lists empty."
        )

    @model_validator(mode="after")
    def _best(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise field_error(
                "best_of",
                f"best_of={self.best_of}: this server chooses among no outputs; leave it out, or"
                " give as many as n.",
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts."""
        return self.prompt

    def params(self, settings: ServerSettings) -> SamplingParams:
        """Makes what the engine takes; see `SampledRequest.sampling`."""
        return self.sampling(
            settings,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


def _are_tokens(value: Any) -> bool:
    # bool is an int to isinstance, and no token.
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
