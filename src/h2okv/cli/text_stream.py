"""Tokens turned into text while they arrive, and the times when they came."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from h2okv.engine.detokenizer import Detokenizer


class TextStream(BaseStreamer):
    """Hands on each piece of text as soon as it can no longer change."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: torch.Tensor,
        write: Callable[[str], None],
        on_first_token: Callable[[], None],
    ) -> None:
        self.arrival_times: list[float] = []
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer, prompt_ids[0].tolist())
        self._write = write
        self._on_first_token = on_first_token
        self._prompt_is_next = True

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return self._detokenizer.token_ids

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one new token at a time, from `generate`."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        self.arrival_times.append(time.perf_counter())
        if not self.token_ids:
            self._on_first_token()
        self._hand_on(self._detokenizer.add(value.flatten().tolist()))

    def end(self) -> None:
        """Hands on what is left, finished or not; call it after an interrupt as well."""
        self._hand_on(self._detokenizer.end())

    def _hand_on(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._write(piece)
