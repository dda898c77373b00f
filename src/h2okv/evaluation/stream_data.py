"""Texts and conversations to stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from h2okv.evaluation.model import tokenize
from h2okv.integration.chat_template import ChatTemplateError, chat_text
from h2okv.provenance import digest
from h2okv.records import check_text, read_jsonl, read_text_file

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        role: `system`, `user` or `assistant`.
        content: The text.
    """

    role: str
    content: str


Conversation = tuple[Message, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """Reads conversations.

    A line is a JSON object with the field ``turns``, a list of what the user says (MT-Bench), or
    ``messages``, a list of objects with ``role`` and ``content``. Other fields are passed over.
    """
    what = "an object with turns or messages"
    found = [_conversation(line.fields, line.place) for line in read_jsonl(path, what)]
    if not found:
        raise ValueError(f"'{path}' has no conversations; give a JSONL file with one on each line")
    return found


def _conversation(fields: dict[str, Any], where: str) -> Conversation:
    given = [name for name in ("turns", "messages") if name in fields]
    if len(given) != 1:
        what = "both turns and messages" if given else "neither turns nor messages"
        raise ValueError(f"{where} has {what}; give one of these fields")
    name = given[0]
    entries = fields[name]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: {name} is not a list with entries; give at least one")
    read = _turn if name == "turns" else _message
    messages = tuple(read(entry, f"{where}: {name}[{i}]") for i, entry in enumerate(entries))
    if name == "messages":
        _check_order(messages, where)
    return messages


def _turn(entry: Any, where: str) -> Message:
    return Message("user", check_text(entry, where))


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object; give one with role and content")
    role = entry.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role is {role!r}; give one of {', '.join(_ROLES)}")
    return Message(role, check_text(entry.get("content"), f"{where}.content"))


def _check_order(messages: Conversation, where: str) -> None:
    before = "start"
    for i, message in enumerate(messages):
        if message.role == "system" and before != "start":
            raise ValueError(
                f"{where}: messages[{i}].role is 'system'; only the first message may be that"
            )
        if message.role == "assistant" and before != "user":
            raise ValueError(
                f"{where}: messages[{i}].role is 'assistant', but no message of the user stands"
                " before it; an answer needs a question"
            )
        before = message.role
    if before == "system":
        raise ValueError(f"{where}: messages has no message of the user; give at least one")


# Stands for an answer that is not known when the text around it is made. It must come through a
# template unchanged, so it is a word of letters that no text contains.
_ANSWER = "h2okvAnswerStandsHere"


@dataclass(frozen=True)
class TextSegment:
    """What the model is given to read before it answers, or at a conversation's end.

    Attributes:
        text: The text, the marks of the roles included.
        answers: Whether the model answers after it.
    """

    text: str
    answers: bool


def chat_segments(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> list[TextSegment]:
    """Cuts a conversation into what is read at once.

    A message of the user without an answer after it is answered by the model; an answer that is
    given is read. The text goes by the tokenizer's chat template, without one as
    ``User: ...`` and ``Assistant: ...``.
    """
    messages: list[dict[str, str]] = []
    segments = []
    for number, message in enumerate(conversation):
        messages.append({"role": message.role, "content": message.content})
        if _is_open(conversation, number):
            segments.append(TextSegment(_since_answer(_rendered(tokenizer, messages, True)), True))
            messages.append({"role": "assistant", "content": _ANSWER})
    if conversation[-1].role == "assistant":
        segments.append(TextSegment(_since_answer(_rendered(tokenizer, messages, False)), False))
    return segments


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


@dataclass(frozen=True)
class Segment:
    """Tokens that are given.

    Attributes:
        ids: int64 [T].
        answers: Whether the model goes on from them with an answer of its own.
    """

    ids: torch.Tensor
    answers: bool


class StreamSource(Protocol):
    """Samples, each a list of segments, which follow one another on one cache.

    Attributes:
        digest: Names the content, so that a stream is resumed on the same one only.
    """

    digest: str

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, sample: int) -> list[Segment]:
        """Returns a sample's segments."""


class TextSource:
    """One text as one sample, from tokens."""

    def __init__(self, ids: torch.Tensor, digest: str) -> None:
        if len(ids) < 2:
            raise ValueError(
                f"the text has {len(ids)} tokens for this model; a text to score needs 2 or more"
            )
        self.ids = ids
        self.digest = digest

    @classmethod
    def of_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TextSource:
        """Makes a source from a text."""
        return cls(torch.tensor(tokenize(tokenizer, text, vocab_size)), digest(text))

    @classmethod
    def of_file(cls, path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TextSource:
        """Makes a source from a text file; see `of_text` and `read_text_file`."""
        return cls.of_text(read_text_file(path), tokenizer, vocab_size)

    @property
    def num_tokens(self) -> int:
        """How many tokens can be read, so that the one after each is known."""
        return len(self.ids) - 1

    def __len__(self) -> int:
        """Returns 1."""
        return 1

    def __getitem__(self, sample: int) -> list[Segment]:
        """Returns the whole text."""
        return [Segment(self.ids, answers=False)]


class ConversationSource:
    """Conversations, each a sample; they become tokens when their turn comes."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.conversations = read_conversations(path)
        self.digest = digest(repr(self.conversations))
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # A base model's conversations are parted by its BOS, or by lines where it has none.
        self._plain = not tokenizer.chat_template
        self._has_bos = bool(tokenizer("", verbose=False)["input_ids"])
        for conversation in self.conversations[:1]:
            chat_segments(tokenizer, conversation)  # a template that refuses is heard about early

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self.conversations)

    def __getitem__(self, sample: int) -> list[Segment]:
        """Returns a conversation's segments, tokenized."""
        segments = []
        for number, segment in enumerate(
            chat_segments(self._tokenizer, self.conversations[sample])
        ):
            is_start = self._plain and number == 0
            text = segment.text
            if is_start and sample > 0 and not self._has_bos:
                text = "\n\n" + text
            # A chat template writes the special tokens into the text.
            ids = tokenize(self._tokenizer, text, self._vocab_size, special=is_start)
            segments.append(Segment(torch.tensor(ids, dtype=torch.int64), segment.answers))
        return segments
