"""How a conversation becomes text for a model that reads it piece by piece on one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from h2okv.evaluation.conversations import Conversation, Message
from h2okv.integration.chat_text import ChatTemplateError, chat_text

# Stands for an answer that is not known when the text around it is made. It must come through a
# template unchanged, so it is a word of letters that no text contains.
_ANSWER = "h2okvAnswerStandsHere"


@dataclass(frozen=True)
class TextPiece:
    """What the model is given to read before it answers, or at a conversation's end.

    Attributes:
        text: The text, the marks of the roles included.
        answers: Whether the model answers after it.
    """

    text: str
    answers: bool


def chat_pieces(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[TextPiece]:
    """Cuts a conversation into what is read at once.

    A message of the user without an answer after it is answered by the model; an answer that is
    given is read. The text goes by the tokenizer's chat template, without one as
    ``User: ...`` and ``Assistant: ...``.

    Args:
        tokenizer: The model's tokenizer.
        conversation: From `read_conversations`.

    Returns:
        The pieces; the model's answers stand between them and after the last one.

    Raises:
        ValueError: If the template refuses the conversation.
    """
    messages: list[dict[str, str]] = []
    pieces = []
    for number, message in enumerate(conversation):
        messages.append({"role": message.role, "content": message.content})
        if _is_open(conversation, number):
            pieces.append(TextPiece(_since_answer(_rendered(tokenizer, messages, True)), True))
            messages.append({"role": "assistant", "content": _ANSWER})
    if conversation[-1].role == "assistant":
        pieces.append(TextPiece(_since_answer(_rendered(tokenizer, messages, False)), False))
    return pieces


def _is_open(conversation: Sequence[Message], number: int) -> bool:
    """Tells whether a message wants an answer that the file does not give."""
    if conversation[number].role != "user":
        return False
    following = conversation[number + 1 : number + 2]
    return not following or following[0].role != "assistant"


def _since_answer(text: str) -> str:
    return text[text.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in text else text


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], to_answer: bool
) -> str:
    try:
        text = chat_text(tokenizer, messages, to_answer=to_answer)
    except ChatTemplateError as error:
        raise ValueError(
            f"the model's chat template refuses the conversation ({error.reason}); give messages"
            " that it takes"
        ) from error
    if _ANSWER not in text and any(message["content"] == _ANSWER for message in messages):
        raise ValueError(
            "the model's chat template leaves out earlier answers, so a conversation cannot go on"
            " with what the cache holds; give conversations of one turn"
        )
    return text
