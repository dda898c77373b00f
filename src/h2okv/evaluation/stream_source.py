"""What a stream reads: one long text, or conversation after conversation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from h2okv.evaluation.chat_form import chat_pieces
from h2okv.evaluation.conversations import read_conversations
from h2okv.evaluation.digest import digest
from h2okv.evaluation.text_file import read_text_file


@dataclass(frozen=True)
class Piece:
    """Tokens that are given.

    Attributes:
        ids: int64 [T].
        answers: Whether the model goes on from them with an answer of its own.
    """

    ids: torch.Tensor
    answers: bool


class StreamSource(Protocol):
    """Samples, each a list of pieces, which follow one another on one cache.

    Attributes:
        digest: Names the content, so that a stream is resumed on the same one only.
    """

    digest: str

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, sample: int) -> list[Piece]:
        """Returns a sample's pieces."""


class TextSource:
    """One text as one sample, from tokens.

    Args:
        ids: int64 [T], at least two.
        digest: Names the content.

    Raises:
        ValueError: If there are fewer than two tokens, so that nothing can be scored.
    """

    def __init__(self, ids: torch.Tensor, digest: str) -> None:
        if len(ids) < 2:
            raise ValueError(
                f"the text has {len(ids)} tokens for this model; a text to score needs 2 or more"
            )
        self.ids = ids
        self.digest = digest

    @classmethod
    def of_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TextSource:
        """Makes a source from a text.

        Args:
            text: The text.
            tokenizer: The model's tokenizer.
            vocab_size: How many tokens the model knows.

        Returns:
            The source; it begins as the tokenizer lets texts begin (with BOS, for many).

        Raises:
            ValueError: If it has too few tokens, or the tokenizer is not the model's.
        """
        return cls(_encode(tokenizer, text, True, vocab_size), digest(text))

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

    def __getitem__(self, sample: int) -> list[Piece]:
        """Returns the whole text."""
        return [Piece(self.ids, answers=False)]


class ConversationSource:
    """Conversations, each a sample; they become tokens when their turn comes.

    Args:
        path: The JSONL file; see `read_conversations`.
        tokenizer: The model's tokenizer.
        vocab_size: How many tokens the model knows.

    Raises:
        ValueError: If the file is not what it should be.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.conversations = read_conversations(path)
        self.digest = digest(repr(self.conversations))
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # A base model's conversations are parted by its BOS, or by lines where it has none.
        self._plain = not tokenizer.chat_template
        self._has_bos = bool(tokenizer("", verbose=False)["input_ids"])
        for conversation in self.conversations[:1]:
            chat_pieces(tokenizer, conversation)  # a template that refuses is heard about early

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self.conversations)

    def __getitem__(self, sample: int) -> list[Piece]:
        """Returns a conversation's pieces, tokenized.

        Args:
            sample: The conversation's number.

        Returns:
            Its pieces.

        Raises:
            ValueError: If the chat template refuses it, or the tokenizer is not the model's.
        """
        pieces = []
        for number, piece in enumerate(chat_pieces(self._tokenizer, self.conversations[sample])):
            is_start = self._plain and number == 0
            text = piece.text
            if is_start and sample > 0 and not self._has_bos:
                text = "\n\n" + text
            # A chat template writes the special tokens into the text.
            ids = _encode(self._tokenizer, text, is_start, self._vocab_size)
            pieces.append(Piece(ids, piece.answers))
        return pieces


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, special: bool, vocab_size: int
) -> torch.Tensor:
    encoded = tokenizer(text, add_special_tokens=special, verbose=False)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {int(ids.max())}, but the model knows only {vocab_size};"
            " get the model again, with its own tokenizer"
        )
    return ids
