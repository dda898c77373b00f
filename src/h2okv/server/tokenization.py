"""Prompts of requests to tokens, and tokens to text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from h2okv.prompts.chat_template import (
    PLAIN_STOPS,
    adds_special,
    chat_text,
    encode,
    message_spans,
)
from h2okv.prompts.images import EncodedPrompt, ImageEncoder
from h2okv.prompts.messages import Conversation
from h2okv.prompts.readers import UNLIMITED, FieldError, PromptLimits
from h2okv.server.errors import invalid

Result = TypeVar("Result")

_BLOCKING_SIZE = 4096
"""Characters, bytes or tokens above which work would block the event loop."""


class PromptReader:
    """Tokenizes prompts, and refuses those that are too long."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = UNLIMITED,
        image_encoder: ImageEncoder | None = None,
        pin: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self._image_encoder, self._pin = tokenizer, image_encoder, pin
        self._limits = PromptLimits(len(tokenizer), None, max_tokens)
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token
        tokenizer("a")  # the first call may initialize the tokenizer, which is not thread-safe

    def read(self, prompt: Conversation | Sequence[Any]) -> EncodedPrompt:
        """Tokenize a text, tokens, or a chat up to the start of the answer."""
        if isinstance(prompt, str):
            return self._read_text(prompt, "prompt")
        if not isinstance(prompt, Conversation):
            return self._with_text(EncodedPrompt(tuple(prompt)), "prompt")
        try:
            return self._read_chat(prompt)
        except FieldError:
            raise
        except ValueError as error:
            raise invalid(str(error), "messages") from error

    def _read_chat(self, chat: Conversation) -> EncodedPrompt:
        pins = message_spans(self.tokenizer, chat, self._pin, needs_all=False)
        if chat.images and self._image_encoder is not None:
            return self._with_text(self._image_encoder.encode(chat), "messages")
        text, is_plain = chat_text(self.tokenizer, chat), not self.tokenizer.chat_template
        options: dict[str, Any] = {"pins": pins, "stops": PLAIN_STOPS if is_plain else ()}
        options["strips_start"] = is_plain and not chat.continues
        special = adds_special(self.tokenizer, text)
        return self._read_text(text, "messages", special, **options)

    def _read_text(
        self, text: str, field: str, special: bool = True, **options: Any
    ) -> EncodedPrompt:
        characters = f"a text of {len(text)} characters"
        self._check_length(-(-len(text) // self._longest), field, characters)
        token_ids = tuple(encode(self.tokenizer, text, special=special))
        self._check_length(len(token_ids), field)
        return EncodedPrompt(token_ids, text=text, is_text=True, **options)

    def _with_text(self, prompt: EncodedPrompt, field: str) -> EncodedPrompt:
        self._check_length(len(prompt.token_ids), field)
        self._limits.check_tokens(prompt.token_ids, field)
        decode = self.tokenizer.decode
        text = decode(list(prompt.token_ids), clean_up_tokenization_spaces=False)
        return replace(prompt, text=str(text))

    def _check_length(self, length: int, field: str, got: str | None = None) -> None:
        # No tokens are an error only where something is generated.
        self._limits.check_length(max(1, length), name=field, got=got)


def work_size(size: int, prompts: Sequence[Any]) -> int:
    """Return the size of the work on prompts; that on images is large, however small their file."""
    has_images = any(isinstance(prompt, Conversation) and prompt.images for prompt in prompts)
    return UNLIMITED if has_images else size


async def off_the_loop(size: int, work: Callable[[], Result]) -> Result:
    """Run ``work``, in a thread if its ``size`` is large, to keep the event loop responsive."""
    return await asyncio.to_thread(work) if size > _BLOCKING_SIZE else work()
