"""Text of tokens: as it grows, up to stop strings, and of single tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Tokens of the prompt that are decoded with the first new one, so that the decoder knows that the
# new token follows a word and keeps the space before it.
_LEAD = 4
_UNFINISHED = "\ufffd"
THOUGHTS, THOUGHTS_END = "<think>", "</think>"
"""Tags of the templates whose answers begin with thoughts."""


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Bytes by the characters that byte-level tokenizers write for them."""


class Detokenizer:
    """Passes on text once it can no longer change: a character may need several tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self.token_ids: list[int] = []
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        # The tokens of the last text that was passed on and those after it, and the number of
        # tokens whose text was passed on.
        self._window = list(prompt[-_LEAD:])
        self._num_shown = len(self._window)

    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is final now, often a word or nothing."""
        self.token_ids.extend(token_ids)
        self._window.extend(token_ids)
        return self._next()

    def end(self) -> str:
        """Return the remaining text, even if its last character is incomplete."""
        return self._next(is_end=True)

    def _next(self, is_end: bool = False) -> str:
        # Decode with some earlier tokens: a decoder may drop the space at the start.
        tokens, decode, skips = self._window, self._tokenizer.decode, self._skips_special
        shown = str(decode(tokens[: self._num_shown], skip_special_tokens=skips))
        piece = str(decode(tokens, skip_special_tokens=skips))[len(shown) :]
        if not piece or (piece.endswith(_UNFINISHED) and not is_end):
            return ""
        self._window = tokens[self._num_shown :]
        self._num_shown = len(self._window)
        return piece


def partial_length(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins a word, and is not all of it."""
    for length in range(min(max(map(len, words), default=1) - 1, len(text)), 0, -1):
        if any(word.startswith(text[-length:]) for word in words):
            return length
    return 0


class StopText:
    """Passes on text up to the first stop string, and never a prefix of one."""

    def __init__(self, stop_strings: Sequence[str], strips_start: bool = True) -> None:
        self.stopped: str | None = None  # the stop string that ended the text
        self.text = ""  # passed on so far
        self._stop_strings, self._strips_start = stop_strings, strips_start
        self._pending = ""

    def add(self, piece: str) -> str:
        """Take the next piece; return the text that is final now, nothing after a stop string."""
        if self.stopped is not None:
            return ""
        self._pending += piece
        hits = ((self._pending.find(stop), -len(stop), stop) for stop in self._stop_strings)
        matches = [match for match in hits if match[0] >= 0]
        if not matches:
            return self._emit(
                len(self._pending) - partial_length(self._pending, self._stop_strings)
            )
        # Of stop strings that begin at the same offset, the longest one, in any order.
        offset, _, self.stopped = min(matches)
        return self._emit(offset)

    @property
    def behind_stop(self) -> str:
        """The text behind the stop string, of the piece that had it."""
        return self._pending[len(self.stopped or self._pending) :]

    def end(self) -> str:
        """Return the text that was held back and did not become a stop string."""
        return "" if self.stopped is not None else self._emit(len(self._pending))

    def _emit(self, length: int) -> str:
        piece, self._pending = self._pending[:length], self._pending[length:]
        if self._strips_start and not self.text:
            piece = piece.lstrip()
        self.text += piece
        return piece


class Thoughts:
    """Divides an answer into the thoughts that it begins with, if any, and its text.

    Thoughts that do not end take all of the answer; later tags are text. They are open where the
    prompt begins them.
    """

    def __init__(self, is_open: bool) -> None:
        self.is_open = self.has_begun = is_open
        self._inside, self._text, self._is_over = StopText([THOUGHTS_END]), "", False

    @property
    def may_begin(self) -> bool:
        """Whether there are thoughts, or may still be."""
        return self.has_begun or not self._is_over

    def split(self, piece: str, is_end: bool) -> tuple[str, str]:
        """Return the thoughts and the text of the next piece; mutates."""
        if not (self.has_begun or self._is_over):
            self._text += piece
            begin = self._text.lstrip()
            if THOUGHTS.startswith(begin) and begin != THOUGHTS and not is_end:
                return "", ""
            self.is_open = self.has_begun = begin.startswith(THOUGHTS)
            self._is_over = not self.has_begun
            piece = begin.removeprefix(THOUGHTS) if self.has_begun else self._text
        thoughts = ""
        if self.is_open:
            thoughts = self._inside.add(piece) + (self._inside.end() if is_end else "")
            self.is_open, piece = self._inside.stopped is None, self._inside.behind_stop
        if not self._is_over:  # blanks behind the thoughts
            piece = piece.lstrip()
            self._is_over = bool(piece)
        return thoughts, piece


class SequenceText:
    """The text of a sequence, token by token, up to a stop string."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
        strips_start: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = StopText(stop_strings, strips_start)

    def add(self, token: int) -> bool:
        """Take the next token; return whether a stop string has ended the text."""
        self._stop.add(self._detokenizer.add([token]))
        return self._stop.stopped is not None

    def end(self) -> str:
        """Return the whole text."""
        self._stop.add(self._detokenizer.end())
        self._stop.end()
        return self._stop.text


def is_inside_character(data: bytes) -> bool:
    """Return whether UTF-8 bytes begin within a character."""
    return bool(data) and data[0] & 0xC0 == 0x80


class TokenText:
    """Text of single tokens, even where a token is only a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._anchor_text = self._decode(self._anchor)
        # UTF-8 bytes of a token, perhaps only a part of a character.
        self.data = lru_cache(maxsize=65536)(self._find_bytes)

    def text(self, token: int) -> str:
        """Return a token's text; for a part of a character its bytes in hexadecimal."""
        token_bytes = self.data(token)
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def length(self, token: int) -> int:
        """Return the number of characters that begin in a token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.data(token))

    def _find_bytes(self, token: int) -> bytes:
        # Decode after another token: a decoder may drop the space at the start of a text.
        text = self._decode([*self._anchor, token])[len(self._anchor_text) :]
        if "\ufffd" in text:  # a part of a character
            piece = str(self._tokenizer.convert_ids_to_tokens(token))
            if match := _BYTE.fullmatch(piece):
                return bytes([int(match.group(1), 16)])
            if all(letter in _LETTERS for letter in piece):
                return bytes(_LETTERS[letter] for letter in piece)
        return text.encode("utf-8")

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
