"""Prompts of requests to tokens, and tokens to text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from h2okv.prompts.chat_template import (
    PLAIN_STOPS,
    ChatTemplateError,
    Pins,
    adds_special,
    chat_text,
    encode,
    message_spans,
)
from h2okv.prompts.images import EncodedPrompt, ImageEncoder
from h2okv.prompts.messages import Conversation
from h2okv.prompts.readers import UNLIMITED, PromptLimits
from h2okv.server.errors import invalid

Result = TypeVar("Result")

_BLOCKING_SIZE = 4096
"""Characters, bytes or tokens above which work would block the event loop."""


class Prompt(NamedTuple):
    """A prompt's tokens and text; special tokens are not part of a text that came as text."""

    token_ids: tuple[int, ...]
    text: str
    is_text: bool
    stops: tuple[str, ...] = ()  # stop strings in addition to those of the request
    strips_start: bool = False  # whether a space before the output belongs to the template
    encoded: EncodedPrompt | None = None  # the prompt with its images or pins, if it has any

    @property
    def source(self) -> EncodedPrompt | tuple[int, ...]:
        """What the engine generates from."""
        return self.encoded or self.token_ids


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

    def read(self, prompt: Conversation | Sequence[Any]) -> Prompt:
        """Tokenize a text, tokens, or a chat up to the start of the answer."""
        field, stops, strips_start, special = "prompt", tuple[str, ...](), False, True
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Conversation):
            field, is_plain = "messages", not self.tokenizer.chat_template
            stops = PLAIN_STOPS if is_plain else ()
            strips_start = is_plain and not prompt.continues
            try:
                if prompt.images and self._image_encoder is not None:
                    self._pins_of(prompt)
                    return self._read_images(self._image_encoder.encode(prompt))
                text = chat_text(self.tokenizer, prompt)
            except ChatTemplateError as error:
                raise invalid(str(error), field) from error
            special = adds_special(self.tokenizer, text)
        else:
            return self._read_tokens(tuple(prompt), field)
        characters = f"a text of {len(text)} characters"
        self._check_length(-(-len(text) // self._longest), field, characters)
        token_ids = tuple(encode(self.tokenizer, text, special=special))
        self._check_length(len(token_ids), field)
        pins = self._pins_of(prompt)
        encoded = EncodedPrompt(token_ids, pins=pins) if pins else None
        return Prompt(token_ids, text, True, stops, strips_start, encoded)

    def _pins_of(self, prompt: Any) -> Pins:
        """Return the pins of a chat, of the messages that it has."""
        if not isinstance(prompt, Conversation):
            return ()
        try:
            return message_spans(self.tokenizer, prompt, self._pin, needs_all=False)
        except ValueError as error:
            raise invalid(str(error), "messages") from error

    def _read_images(self, encoded: EncodedPrompt) -> Prompt:
        self._check_length(len(encoded.token_ids), "messages")
        text = self.tokenizer.decode(list(encoded.token_ids), clean_up_tokenization_spaces=False)
        return Prompt(encoded.token_ids, str(text), False, encoded=encoded)

    def _read_tokens(self, token_ids: tuple[int, ...], field: str) -> Prompt:
        self._check_length(len(token_ids), field)
        self._limits.check_tokens(token_ids, field)
        text = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return Prompt(token_ids, str(text), False)

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
