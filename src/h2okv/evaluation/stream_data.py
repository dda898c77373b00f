"""Texts and conversations to stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from h2okv.integration.chat_template import chat_text, encode
from h2okv.provenance import digest
from h2okv.records import Record, check_text, read_jsonl

_ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """One message: its role is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


Conversation = tuple[Message, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """Read JSONL of ``turns`` (what the user says) or ``messages`` (role and content)."""
    return [_conversation(line) for line in read_jsonl(path, "an object with turns or messages")]


def _conversation(line: Record) -> Conversation:
    given = [name for name in ("turns", "messages") if name in line.fields]
    if len(given) != 1:
        what = "both turns and messages" if given else "neither turns nor messages"
        raise ValueError(f"{line.place} has {what}; give one of these fields")
    name = given[0]
    entries = line.fields[name]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{line.place}: {name} is not a list with entries; give at least one")
    found: list[Message] = []
    for number, entry in enumerate(entries):
        place = f"{line.place}: {name}[{number}]"
        if name == "turns":
            found.append(Message("user", check_text(entry, place)))
        else:
            found.append(_message(entry, place, found[-1].role if found else None))
    if all(message.role == "system" for message in found):
        raise ValueError(f"{line.place}: messages has no message of the user; give at least one")
    return tuple(found)


def _message(entry: Any, place: str, before: str | None) -> Message:
    """Read one of ``messages``, after one of the role ``before``."""
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is not an object; give one with role and content")
    role = entry.get("role")
    if role not in _ROLES:
        raise ValueError(f"{place}.role is {role!r}; give one of {', '.join(_ROLES)}")
    if role == "system" and before is not None:
        raise ValueError(f"{place}.role is 'system'; only the first message may be that")
    if role == "assistant" and before != "user":
        raise ValueError(f"{place}.role is 'assistant' with no question before it; give one")
    return Message(role, check_text(entry.get("content"), f"{place}.content"))


# Stands for an answer that is not known when the text around it is made. It must come through a
# template unchanged, so it is a word of letters that no text contains.
_ANSWER = "h2okvAnswerStandsHere"


def chat_segments(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> list[tuple[str, bool]]:
    """Cut a conversation into texts that are read at once, and whether the model answers each."""
    messages: list[dict[str, str]] = []
    segments: list[tuple[str, bool]] = []
    roles = [*(message.role for message in conversation), None]
    for number, message in enumerate(conversation):
        messages.append(message._asdict())
        is_last, asks = roles[number + 1] is None, message.role == "user"
        to_answer = asks and roles[number + 1] != "assistant"  # an answer that is given is read
        if to_answer or (is_last and not asks):
            text = chat_text(tokenizer, messages, to_answer=to_answer)
            if segments and _ANSWER not in text:
                raise ValueError(
                    "the model's chat template leaves out earlier answers, so a conversation cannot"
                    " go on with what the cache holds; give conversations of one turn"
                )
            segments.append((text.rpartition(_ANSWER)[2], to_answer))
            messages.append({"role": "assistant", "content": _ANSWER})
    return segments


class Segment(NamedTuple):
    """Tokens that are given."""

    ids: torch.Tensor  # int64 [T]
    answers: bool  # whether the model goes on from them with an answer of its own


class TextSource:
    """One text as one sample, from tokens."""

    def __init__(self, ids: torch.Tensor, digest: str) -> None:
        if len(ids) < 2:
            raise ValueError(f"the text has {len(ids)} tokens; a text to score needs 2 or more")
        self.ids = ids
        self.digest = digest

    @classmethod
    def of_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TextSource:
        return cls(torch.tensor(encode(tokenizer, text, vocab_size)), digest(text))

    @property
    def num_tokens(self) -> int:
        """How many tokens can be read, so that the one after each is known."""
        return len(self.ids) - 1

    def __len__(self) -> int:
        return 1

    def __getitem__(self, sample: int) -> list[Segment]:
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
        chat_segments(tokenizer, self.conversations[0])  # a template that refuses is heard early

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


# Samples, each a list of segments, which follow one another on one cache; its digest names them, so
# that a stream is resumed on the same ones only.
StreamSource = TextSource | ConversationSource
