"""The tokens that all prompts with the same beginning share."""

from __future__ import annotations

import os
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from h2okv.server.prompt import PromptReader

# A token may reach from a text's end into what follows, so it is tried with different things.
_FOLLOWING = ("a", "1", " a", "\n", ".")
_ANY_LENGTH = 1 << 40


def text_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Finds what prompts that begin with a text have in common.

    Args:
        tokenizer: The model's.
        text: The text.

    Returns:
        The tokens; the text's last ones are missing where they depend on what follows.
    """
    reader = PromptReader(tokenizer, _ANY_LENGTH)
    return _shared([reader.read(text + end).token_ids for end in _FOLLOWING])


def system_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Finds what chats with the same system message have in common.

    Args:
        tokenizer: The model's; its chat template is used if it has one.
        text: The message.

    Returns:
        The tokens.

    Raises:
        ApiError: If the template does not take a system message.
    """
    reader = PromptReader(tokenizer, _ANY_LENGTH)
    system = {"role": "system", "content": text}
    chats = [[system, {"role": "user", "content": end.strip() or "b"}] for end in _FOLLOWING]
    return _shared([reader.read_chat(chat).token_ids for chat in chats])


def _shared(lists: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(os.path.commonprefix(list(lists)))
