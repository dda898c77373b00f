"""Chat templates: messages to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from h2okv.records import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Where an answer ends in the plain form: the model would write the user's next line.
PLAIN_STOPS = ("\n\nUser:", "\nUser:")
_PLAIN_FORMS = {"system": "{}\n\n", "user": "User: {}\n\n", "assistant": "Assistant: {}\n\n"}


class ChatTemplateError(ValueError):
    """A model's chat template does not take these messages; `reason` says why, in one line."""

    def __init__(self, reason: str) -> None:
        self.reason = " ".join(reason.split()).rstrip(".")
        super().__init__(
            f"the model's chat template does not take these messages ({self.reason}); give messages"
            " that it takes."
        )


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    *,
    to_answer: bool = True,
) -> str:
    """Puts messages in the form that a model knows: its chat template, or the plain form."""
    if not tokenizer.chat_template:  # a template's text has all special tokens in it, this has none
        text = "".join(_PLAIN_FORMS[one["role"]].format(one["content"]) for one in messages)
        return f"{text}Assistant:" if to_answer else text
    apply: Any = tokenizer.apply_chat_template
    try:
        return str(apply(list(messages), tokenize=False, add_generation_prompt=to_answer))
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ChatTemplateError(str(error)) from error


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Refuses tokens that a model has no embedding for."""
    if ids and max(ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {max(ids)}, but the model knows only {vocab_size}; get the"
            " model again, with its own tokenizer"
        )


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, str]],
    vocab_size: int | None = None,
    special: bool = True,
) -> list[int]:
    """The tokens of a text, or of messages up to their answer; none outside the vocabulary."""
    if not isinstance(prompt, str):
        prompt, special = chat_text(tokenizer, prompt), not tokenizer.chat_template
    ids = list(tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"])
    if vocab_size is not None:
        check_vocabulary(ids, vocab_size)
    return ids


PINNABLE = ("system", "user", "last_user")


def check_pinnable(pin: Sequence[str]) -> None:
    """Raises if one of them does not name messages."""
    for name in pin:
        if name not in PINNABLE:
            raise unknown_name("pin", name, PINNABLE)


def message_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], pin: Sequence[str]
) -> list[tuple[int, int]]:
    """Where messages that `PINNABLE` names stand in the tokens of a chat, for `H2OCache.pin`."""
    if not pin:
        return []
    check_pinnable(pin)
    for name in pin:
        if not any(one["role"] == name.removeprefix("last_") for one in messages):
            raise ValueError(f"pin={name!r} finds no {name} message; leave it out, or give one.")
    text = chat_text(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=not tokenizer.chat_template, verbose=False)
    last, at, found = max(n for n, one in enumerate(messages) if one["role"] == "user"), 0, []
    for number, message in enumerate(messages):
        content, role = message["content"].strip(), message["role"]
        at = text.find(content, at)
        if at < 0:
            raise ValueError("the chat template changes the messages, so that none can be pinned.")
        if content and (role in pin or (number == last and "last_user" in pin)):
            first, end = encoded.char_to_token(at), encoded.char_to_token(at + len(content) - 1)
            found.append((first, end + 1))
        at += len(content)
    return found
