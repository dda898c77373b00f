"""Single tokens as text and as bytes, for the log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
_ANCHOR = "a"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Says what a token stands for, even where it is only a part of a character.

    Args:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"])
        self._anchor_text = self._decode(self._anchor)
        self._bytes = lru_cache(maxsize=65536)(self._find_bytes)

    def data(self, token: int) -> bytes:
        """Returns a token's bytes in UTF-8; a part of a character may be all there is."""
        return self._bytes(token)

    def text(self, token: int) -> str:
        """Returns a token's text; for a part of a character its bytes in hexadecimal."""
        data = self.data(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def length(self, token: int) -> int:
        """Returns how many characters begin in a token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.data(token))

    def _find_bytes(self, token: int) -> bytes:
        # Behind another token, for a decoder may drop the space at a text's start.
        text = self._decode([*self._anchor, token])[len(self._anchor_text) :]
        if _UNFINISHED not in text:
            return text.encode("utf-8")
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        written = _BYTE.fullmatch(piece)
        if written:
            return bytes([int(written.group(1), 16)])
        letters = _byte_letters()
        if all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return text.encode("utf-8")

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=1)
def _byte_letters() -> Mapping[str, int]:
    """The letters that byte-level tokenizers write for bytes, as GPT-2's code lays down."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(shown)]
    letters = {chr(byte): byte for byte in shown}
    letters.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return letters
