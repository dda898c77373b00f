"""Which tokens a prompt may have, and how many of them: the one check of every front end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from h2okv.prompts.readers import FieldError
from h2okv.records import short_repr


class PromptTooLongError(FieldError):
    """A prompt is longer than can be read, or leaves no room for its output."""

    usual_code = "context_length_exceeded"


@dataclass(frozen=True)
class PromptLimits:
    """Limits of the prompts of a model, or of an engine with this model."""

    vocab_size: int
    max_context: int | None = None  # tokens of a prompt and its output together
    max_prompt_tokens: int = sys.maxsize

    def room(self, length: int, max_tokens: int) -> int:
        """Return how many tokens may follow ``length`` ones, at most ``max_tokens``."""
        context = self.max_context
        return max_tokens if context is None else min(max_tokens, context - length)

    def check_tokens(self, tokens: Iterable[Any], name: str = "the prompt") -> None:
        """Raise FieldError for anything but a token of the model's vocabulary."""
        for token in tokens:
            is_int = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_int or not 0 <= token < self.vocab_size:
                raise FieldError.about(
                    name,
                    f": token must be 0 to {self.vocab_size - 1} for this model, got"
                    f" {short_repr(token)}; use the model's own tokenizer",
                )

    def check_length(
        self,
        length: int,
        num_new: int = 1,
        name: str = "the prompt",
        remedy: str = "shorten it",
        got: str | None = None,
    ) -> None:
        """Raise FieldError for a prompt without tokens, or too long for ``num_new`` more."""
        if not length:
            raise FieldError.about(name, " has no tokens; give at least one")
        if length > (limit := self.max_prompt_tokens):
            raise PromptTooLongError.about(
                name, f" must have at most {limit} tokens, got {got or length}; {remedy}"
            )
        if self.room(length, num_new) < num_new:
            raise PromptTooLongError.about(
                name,
                f" and its output must fit the model's context of {self.max_context} tokens,"
                f" got {got or length} and {num_new}; {remedy}",
            )
