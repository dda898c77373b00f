"""Tokens turned into text while they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# How many tokens of the prompt the decoder sees before the first new one: enough for it to know
# that the new token goes on from a word, and so keeps the space before it.
_LEAD = 4
_UNFINISHED = "\ufffd"


class Detokenizer:
    """Hands on each piece of text as soon as it can no longer change.

    A character outside ASCII may be spread over several tokens of a byte-level tokenizer; nothing
    is handed on before its last byte is there.

    Args:
        tokenizer: Decodes the tokens.
        prompt: What they follow.

    Attributes:
        token_ids: All that was added.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._lead = list(prompt[-_LEAD:])
        self._window_start = 0
        self._shown_end = len(self._lead)

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is certain now, often a word or nothing."""
        self.token_ids.extend(token_ids)
        piece = self._unseen_text()
        return "" if piece.endswith(_UNFINISHED) else self._shown(piece)

    def end(self) -> str:
        """Returns what is left, finished or not."""
        return self._shown(self._unseen_text())

    def _unseen_text(self) -> str:
        # Decoded with some tokens before it, for a decoder may drop the space at its start.
        shown = self._decode(self._tokens(self._window_start, self._shown_end))
        return self._decode(self._tokens(self._window_start, None))[len(shown) :]

    def _tokens(self, start: int, end: int | None) -> list[int]:
        """A part of the lead and the tokens behind it, without copying all of a long text."""
        lead = len(self._lead)
        if start >= lead:
            return self.token_ids[start - lead : None if end is None else end - lead]
        return (self._lead + self.token_ids)[start:end]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _shown(self, piece: str) -> str:
        if piece:
            self._window_start = self._shown_end
            self._shown_end = len(self._lead) + len(self.token_ids)
        return piece
