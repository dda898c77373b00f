"""Tokens turned into text while they arrive, and the times when they came."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

# How many tokens of the prompt the decoder sees before the first new one: enough for it to know
# that the new token goes on from a word, and so keeps the space before it.
_LEAD = 4
_UNFINISHED = "\ufffd"


class TextStream(BaseStreamer):
    """Hands on each piece of text as soon as it can no longer change.

    A character outside ASCII may be spread over several tokens of a byte-level tokenizer; nothing
    is handed on before its last byte is there.

    Args:
        tokenizer: Decodes the tokens.
        prompt_ids: int [1, T].
        write: Takes each piece of text.
        on_first_token: Called when the prompt has been read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: torch.Tensor,
        write: Callable[[str], None],
        on_first_token: Callable[[], None],
    ) -> None:
        self.token_ids: list[int] = []
        self.arrival_times: list[float] = []
        self.text = ""
        self._tokenizer = tokenizer
        self._write = write
        self._on_first_token = on_first_token
        self._lead = prompt_ids[0, -_LEAD:].tolist()
        self._window_start = 0
        self._shown_end = len(self._lead)
        self._prompt_is_next = True

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one new token at a time, from `generate`."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        self.arrival_times.append(time.perf_counter())
        if not self.token_ids:
            self._on_first_token()
        self.token_ids.extend(value.flatten().tolist())
        self._hand_on(self._unseen_text())

    def end(self) -> None:
        """Hands on what is left, finished or not; call it after an interrupt as well."""
        self._hand_on(self._unseen_text(), is_last=True)

    def _unseen_text(self) -> str:
        # Decoded with some tokens before it, for a decoder may drop the space at its start.
        tokens = self._lead + self.token_ids
        shown = self._decode(tokens[self._window_start : self._shown_end])
        return self._decode(tokens[self._window_start :])[len(shown) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _hand_on(self, piece: str, is_last: bool = False) -> None:
        if not piece or (piece.endswith(_UNFINISHED) and not is_last):
            return
        self._window_start = self._shown_end
        self._shown_end = len(self._lead) + len(self.token_ids)
        self.text += piece
        self._write(piece)
