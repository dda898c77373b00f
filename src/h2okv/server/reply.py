"""What both kinds of answers are made with."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable

from openai import BaseModel
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from h2okv.engine.serving.outputs import Piece
from h2okv.server.generation import Progress
from h2okv.server.token_text import TokenText

FINGERPRINT = "h2okv"
"""OpenAI's ``system_fingerprint``: the same seed gives the same text only on the same server."""


class Reply(ABC):
    """An answer in OpenAI's types, whole or as a stream.

    Args:
        prefix: Of the id.
        model_name: What the client called the model.
        tokens: Writes tokens out.
        wants_usage: Whether the stream ends with the counts of tokens.
    """

    def __init__(
        self, prefix: str, model_name: str, tokens: TokenText, wants_usage: bool = False
    ) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model_name, self.tokens, self.wants_usage = model_name, tokens, wants_usage

    @abstractmethod
    def whole(self, progress: Progress) -> BaseModel:
        """Makes the answer of a finished job."""

    @abstractmethod
    def opening(self, progress: Progress) -> Iterable[BaseModel]:
        """Makes the chunks that come before any text."""

    @abstractmethod
    def chunks(self, piece: Piece, progress: Progress) -> Iterable[BaseModel]:
        """Makes the chunks of a piece, which ``progress`` has taken already."""

    @abstractmethod
    def closing(self, progress: Progress) -> Iterable[BaseModel]:
        """Makes the chunks that come after all text."""


def usage_of(progress: Progress) -> CompletionUsage:
    """Counts a job's tokens.

    Args:
        progress: The job; each prompt counts once, however many outputs it has.

    Returns:
        OpenAI's counts.
    """
    read, new = progress.prompt_tokens, progress.new_tokens
    return CompletionUsage(
        prompt_tokens=read,
        completion_tokens=new,
        total_tokens=read + new,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=progress.reused_tokens),
    )
