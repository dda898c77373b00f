"""Tokens to text as they come, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# How many tokens of the prompt the decoder sees before the first new one: enough for it to know
# that the new token goes on from a word, and so keeps the space before it.
_LEAD = 4
_UNFINISHED = "\ufffd"


class Detokenizer:
    """Hands on text as soon as it can no longer change: a character may need several tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        # The tokens from the last ones that were shown on, and how many of them were shown.
        self._window = list(prompt[-_LEAD:])
        self._num_shown = len(self._window)

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is certain now, often a word or nothing."""
        self.token_ids.extend(token_ids)
        self._window.extend(token_ids)
        return self._next()

    def end(self) -> str:
        """Returns what is left, finished or not."""
        return self._next(is_end=True)

    def _next(self, is_end: bool = False) -> str:
        # Decoded with some tokens before it, for a decoder may drop the space at its start.
        tokens, decode = self._window, self._tokenizer.decode
        shown = str(decode(tokens[: self._num_shown], skip_special_tokens=True))
        piece = str(decode(tokens, skip_special_tokens=True))[len(shown) :]
        if not piece or (piece.endswith(_UNFINISHED) and not is_end):
            return ""
        self._window = tokens[self._num_shown :]
        self._num_shown = len(self._window)
        return piece


class StopText:
    """Hands text on up to the first stop string, and never a part of one."""

    def __init__(self, stop_strings: Sequence[str], strips_start: bool = True) -> None:
        self.stopped: str | None = None  # the stop string that ended the text
        self.text = ""  # what was handed on
        self._stop_strings, self._strips_start = stop_strings, strips_start
        self._held = ""

    def add(self, piece: str) -> str:
        """Takes the next piece; returns what is certain now, and nothing after a stop string."""
        if self.stopped is not None:
            return ""
        self._held += piece
        places = ((self._held.find(stop), -len(stop), stop) for stop in self._stop_strings)
        found = [place for place in places if place[0] >= 0]
        if not found:
            return self._hand_on(len(self._held) - self._begun())
        # Of those that begin at one place the longest, whatever their order.
        at, _, self.stopped = min(found)
        return self._hand_on(at)

    def end(self) -> str:
        """Returns what was held back, for no stop string came of it."""
        return "" if self.stopped is not None else self._hand_on(len(self._held))

    def _begun(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop_strings):
                return length
        return 0

    def _hand_on(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        if self._strips_start and not self.text:
            piece = piece.lstrip()
        self.text += piece
        return piece
