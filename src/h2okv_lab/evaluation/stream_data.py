"""Texts and conversations to stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from h2okv.prompts.chat_template import chat_text, encode
from h2okv.provenance import digest
from h2okv.records import check_text
from h2okv_lab.tables import Entry, read_jsonl

_ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """One message: its role is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


Conversation = tuple[Message, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """Read JSONL of ``turns`` (the user's messages) or ``messages`` (role and content)."""
    return [_conversation(line) for line in read_jsonl(path, "an object with turns or messages")]


def _conversation(line: Entry) -> Conversation:
    fields = [name for name in ("turns", "messages") if name in line.fields]
    if len(fields) != 1:
        problem = "both turns and messages" if fields else "neither turns nor messages"
        raise ValueError(f"{line.location} has {problem}; give one of these fields")
    name = fields[0]
    entries = line.fields[name]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{line.location}: {name} must be a list with at least one entry; add one")
    messages: list[Message] = []
    for number, entry in enumerate(entries):
        location = f"{line.location}: {name}[{number}]"
        if name == "turns":
            messages.append(Message("user", check_text(entry, location)))
        else:
            messages.append(_message(entry, location, messages[-1].role if messages else None))
    if all(message.role == "system" for message in messages):
        raise ValueError(f"{line.location}: messages must have a message of the user; add one")
    return tuple(messages)


def _message(entry: Any, location: str, previous_role: str | None) -> Message:
    """Read one of ``messages``, which follows one of the role ``previous_role``."""
    if not isinstance(entry, dict):
        raise ValueError(f"{location} must be an object with role and content")
    role = entry.get("role")
    if role not in _ROLES:
        raise ValueError(f"{location}.role must be one of {', '.join(_ROLES)}, got {role!r}")
    if role == "system" and previous_role is not None:
        raise ValueError(f"{location}.role must not be 'system' after the first message; move it")
    if role == "assistant" and previous_role != "user":
        raise ValueError(f"{location}.role is 'assistant' with no question before it; add one")
    return Message(role, check_text(entry.get("content"), f"{location}.content"))


# A placeholder for an answer that the model has yet to give. A template must leave it unchanged, so
# it is a single word, and one that no text contains.
_ANSWER = "h2okvAnswerStandsHere"


def chat_segments(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> list[tuple[str, bool]]:
    """Cut a conversation into texts to read, each with whether the model answers it."""
    messages: list[dict[str, str]] = []
    segments: list[tuple[str, bool]] = []
    roles = [*(message.role for message in conversation), None]
    for number, message in enumerate(conversation):
        messages.append(message._asdict())
        is_last, is_question = roles[number + 1] is None, message.role == "user"
        # An answer in the file is read.
        to_answer = is_question and roles[number + 1] != "assistant"
        if to_answer or (is_last and not is_question):
            text = chat_text(tokenizer, messages, to_answer=to_answer)
            if segments and _ANSWER not in text:
                raise ValueError(
                    "the model's chat template drops earlier answers, so a conversation cannot"
                    " continue on the cache; give conversations of one turn"
                )
            segments.append((text.rpartition(_ANSWER)[2], to_answer))
            messages.append({"role": "assistant", "content": _ANSWER})
    return segments


class Segment(NamedTuple):
    """Input tokens."""

    ids: torch.Tensor  # int64 [T]
    answers: bool  # whether the model answers after them


class TextSource:
    """One text as one sample, from tokens."""

    def __init__(self, ids: torch.Tensor, digest: str) -> None:
        if len(ids) < 2:
            raise ValueError(f"the text must have at least 2 tokens to be scored, got {len(ids)}")
        self.ids = ids
        self.digest = digest

    @classmethod
    def of_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TextSource:
        return cls(torch.tensor(encode(tokenizer, text, vocab_size)), digest(text))

    @property
    def num_tokens(self) -> int:
        """The number of tokens with a next token in the text."""
        return len(self.ids) - 1

    def __len__(self) -> int:
        return 1

    def __getitem__(self, sample: int) -> list[Segment]:
        return [Segment(self.ids, answers=False)]


class ConversationSource:
    """Conversations, each a sample; tokenized on access."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.conversations = read_conversations(path)
        self.digest = digest(repr(self.conversations))
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # Separators between a base model's conversations: its BOS, or an empty line without one.
        self._plain = not tokenizer.chat_template
        self._has_bos = bool(tokenizer("", verbose=False)["input_ids"])
        chat_segments(tokenizer, self.conversations[0])  # raises early if the template refuses

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, sample: int) -> list[Segment]:
        segments = []
        texts = chat_segments(self._tokenizer, self.conversations[sample])
        for number, (text, answers) in enumerate(texts):
            is_start = self._plain and number == 0
            if is_start and sample > 0 and not self._has_bos:
                text = f"\n\n{text}"
            # A chat template writes the special tokens into the text.
            ids = encode(self._tokenizer, text, self._vocab_size, special=is_start)
            segments.append(Segment(torch.tensor(ids, dtype=torch.int64), answers))
        return segments


# Samples, each a list of segments, that are read in order onto one cache. The digest identifies
# them when a stream is resumed.
StreamSource = TextSource | ConversationSource
