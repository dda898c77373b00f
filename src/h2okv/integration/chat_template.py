"""Chat templates: messages to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jinja2

from h2okv.integration.limits import PromptLimits
from h2okv.integration.messages import Conversation
from h2okv.integration.tool_messages import as_plain_messages, takes_tools
from h2okv.records import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_REASON = 300  # characters of a template's reason, which may repeat the entire chat
# Stop strings of the plain form, where the model would go on with the user's next line.
PLAIN_STOPS = ("\n\nUser:", "\nUser:")
_PLAIN_FORMS = {"system": "{}\n\n", "user": "User: {}\n\n", "assistant": "Assistant: {}\n\n"}


class ChatTemplateError(ValueError):
    """A model's chat template does not accept these messages; `reason` says why, in one line."""

    def __init__(self, reason: str) -> None:
        self.reason = " ".join(reason.split())[:_MAX_REASON].rstrip(".")
        super().__init__(
            f"the model's chat template does not take these messages ({self.reason}); give messages"
            " that it takes."
        )


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Conversation | Sequence[Mapping[str, Any]],
    *,
    to_answer: bool | None = None,
) -> str:
    """Render messages with the model's chat template, or in the plain form if it has none.

    Args:
        tokenizer: The model's tokenizer, with its template.
        messages: A conversation, or messages as chat templates take them.
        to_answer: For messages, whether the text ends where a new answer begins; by default as
            `Conversation` decides.

    Returns:
        The text, with all special tokens if a template rendered it, without any otherwise.

    Raises:
        ChatTemplateError: If the template does not accept the messages.
    """
    chat = messages
    if not isinstance(chat, Conversation):
        chat = Conversation(chat, to_answer, None if to_answer is None else False)
    has_tools = bool(chat.tools) or any(
        message["role"] == "tool" or "tool_calls" in message for message in chat.messages
    )
    if has_tools and not takes_tools(tokenizer):
        plain = as_plain_messages(chat.messages, chat.tools)
        chat = replace(
            chat,
            messages=plain,
            tools=(),
            add_generation_prompt=chat.begins_answer,
            continue_final_message=chat.continues,
        )
    *earlier, final = chat.messages
    continues, begins_answer = chat.continues, chat.begins_answer
    if continues and final["role"] == "assistant" and not final["content"]:
        # Nothing to continue: the answer begins after its header.
        chat = replace(chat, messages=earlier)
        continues, begins_answer = False, True
    if not tokenizer.chat_template:
        text = "".join(
            _PLAIN_FORMS[message["role"]].format(message["content"]) for message in chat.messages
        )
        return f"{text}Assistant:" if begins_answer else text[: -2 if continues else None]
    apply: Any = tokenizer.apply_chat_template
    try:
        return str(
            apply(
                list(chat.messages),
                tools=list(chat.tools) or None,
                tokenize=False,
                add_generation_prompt=begins_answer,
                continue_final_message=continues,
                **chat.template_kwargs,
            )
        )
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ChatTemplateError(str(error)) from error


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Conversation | Sequence[Mapping[str, Any]],
    vocab_size: int | None = None,
    special: bool = True,
) -> list[int]:
    """Encode a text, or messages up to their answer; refuse tokens outside the vocabulary."""
    if not isinstance(prompt, str):
        prompt, special = chat_text(tokenizer, prompt), not tokenizer.chat_template
    ids = list(tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    if special and ids[:2] == [bos] * 2:  # the text may begin with a BOS token itself
        unprefixed = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        ids = ids[1:] if len(unprefixed) < len(ids) else ids
    if vocab_size is not None:
        PromptLimits(vocab_size).check_tokens(ids)
    return ids


PINNABLE = ("system", "user", "last_user")


def check_pinnable(pin: Sequence[str]) -> None:
    """Raise if a name in ``pin`` is not one of `PINNABLE`."""
    for name in pin:
        if name not in PINNABLE:
            raise unknown_name("pin", name, PINNABLE)


def message_spans(
    tokenizer: PreTrainedTokenizerBase,
    chat: Conversation | Sequence[Mapping[str, Any]],
    pin: Sequence[str],
) -> list[tuple[int, int]]:
    """Find the tokens of the messages that `PINNABLE` names, for `H2OCache.pin`."""
    if not pin:
        return []
    check_pinnable(pin)
    messages = chat.messages if isinstance(chat, Conversation) else chat
    for name in pin:
        if not any(message["role"] == name.removeprefix("last_") for message in messages):
            raise ValueError(f"pin={name!r} finds no {name} message; leave it out, or give one.")
    text = chat_text(tokenizer, chat)
    encoded = tokenizer(text, add_special_tokens=not tokenizer.chat_template, verbose=False)
    dropped = len(encoded["input_ids"]) - len(encode(tokenizer, chat))
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    offset, spans = 0, []
    for number, message in enumerate(messages):
        content, role = message["content"].strip(), message["role"]
        offset = text.find(content, offset)
        if offset < 0:
            raise ValueError("the chat template changes the messages, so they cannot be pinned.")
        if content and (role in pin or ("last_user" in pin and number == users[-1])):
            first, end = (
                encoded.char_to_token(offset),
                encoded.char_to_token(offset + len(content) - 1),
            )
            spans.append((first - dropped, end + 1 - dropped))
        offset += len(content)
    return spans
