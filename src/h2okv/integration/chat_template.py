"""Chat templates: messages to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

PLAIN_STOPS = ("\n\nUser:", "\nUser:")
"""Where an answer ends in the plain form: the model would write the user's next line."""

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
    """Puts messages in the form that a model knows.

    That is its tokenizer's chat template, whose text has all special tokens in it; for a model
    without one ``User: ...`` and ``Assistant: ...``, to be encoded with special tokens.
    """
    if not tokenizer.chat_template:
        text = "".join(_PLAIN_FORMS[one["role"]].format(one["content"]) for one in messages)
        return f"{text}Assistant:" if to_answer else text
    apply: Any = tokenizer.apply_chat_template
    try:
        return str(apply(list(messages), tokenize=False, add_generation_prompt=to_answer))
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ChatTemplateError(str(error)) from error
