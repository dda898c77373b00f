"""A request's prompt as tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from h2okv.integration.chat_template import PLAIN_STOPS, ChatTemplateError, chat_text
from h2okv.server.errors import ApiError, invalid

Result = TypeVar("Result")

ANY_LENGTH = 1 << 40
_MUCH = 4096
"""Characters, bytes or tokens from which on work would hold up the event loop."""


class Prompt(NamedTuple):
    """A prompt's tokens and text; special tokens are not part of a text that came as text."""

    token_ids: tuple[int, ...]
    text: str
    is_text: bool


class PromptReader:
    """Tokenises prompts, and refuses what is too long."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        # Texts at which a chat's answer ends beside those that a request names.
        self.chat_stops = () if tokenizer.chat_template else PLAIN_STOPS
        self._vocabulary = len(tokenizer)
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        # What has more characters than this has too many tokens, whatever it says.
        self._max_characters = longest * max_tokens
        tokenizer("a")  # the first use may set the tokenizer up, which is best done alone

    def read(self, prompt: str | Sequence[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(self._encode(prompt, "prompt"), prompt, True)
        token_ids = self._checked(tuple(prompt), "prompt")
        least, most = min(token_ids), max(token_ids)
        if least < 0 or most >= self._vocabulary:
            raise invalid(
                f"prompt has the token {least if least < 0 else most}, but the model's tokens are"
                f" 0 to {self._vocabulary - 1}; encode it with the model's own tokenizer.",
                "prompt",
            )
        text = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return Prompt(token_ids, str(text), False)

    def read_chat(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Reads a chat, up to where the answer begins."""
        try:
            text = chat_text(self.tokenizer, messages)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages") from error
        # A template's text has its special tokens in it.
        is_plain = not self.tokenizer.chat_template
        return Prompt(self._encode(text, "messages", special=is_plain), text, is_plain)

    def _encode(self, text: str, field: str, *, special: bool = True) -> tuple[int, ...]:
        if len(text) > self._max_characters:
            raise self._too_long(f"{len(text)} characters", field)
        return self._checked(self.encode(text, special=special), field)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The tokens of a text of any length."""
        encoded = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return tuple(encoded["input_ids"])

    def _checked(self, token_ids: tuple[int, ...], field: str) -> tuple[int, ...]:
        if not token_ids:
            raise invalid(f"{field} has no tokens; give at least one.", field)
        if len(token_ids) > self.max_tokens:
            raise self._too_long(f"{len(token_ids)} tokens", field)
        return token_ids

    def _too_long(self, amount: str, field: str) -> ApiError:
        return invalid(
            f"{field} has {amount}, but this server reads prompts of at most {self.max_tokens}"
            " tokens; send a shorter one.",
            field,
            code="context_length_exceeded",
        )


async def off_the_loop(size: int, work: Callable[[], Result]) -> Result:
    """Does some work, in a thread if it is much, so that other clients do not wait for it."""
    return await asyncio.to_thread(work) if size > _MUCH else work()


# A token may reach from a text's end into what follows, so it is tried with different things.
_FOLLOWING = ("a", "1", " a", "\n", ".")


def text_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The tokens that all prompts share which begin with a text."""
    reader = PromptReader(tokenizer, ANY_LENGTH)
    return _shared([reader.read(text + end).token_ids for end in _FOLLOWING])


def system_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The tokens that all chats share which have the same system message."""
    reader = PromptReader(tokenizer, ANY_LENGTH)
    system = {"role": "system", "content": text}
    chats = [[system, {"role": "user", "content": end.strip() or "b"}] for end in _FOLLOWING]
    return _shared([reader.read_chat(chat).token_ids for chat in chats])


def _shared(lists: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(os.path.commonprefix(list(lists)))
