"""The text that a model is analysed on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

LEAST_TOKENS = 128
MOST_TOKENS = 2048


@dataclass(frozen=True)
class Sample:
    """A text as tokens.

    Attributes:
        input_ids: int64 ``[1, T]``.
        pieces: each token's own text.
    """

    input_ids: torch.Tensor
    pieces: tuple[str, ...]

    @property
    def length(self) -> int:
        """The number of tokens, T."""
        return self.input_ids.shape[1]


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    max_tokens: int,
    min_tokens: int = LEAST_TOKENS,
) -> Sample:
    """Turns the beginning of a text into tokens.

    Args:
        tokenizer: the model's tokenizer.
        text: any text.
        max_tokens: where to cut it off.
        min_tokens: the fewest tokens that make sense for the purpose.

    Returns:
        The sample.

    Raises:
        ValueError: if the text is empty or too short.
    """
    if not text.strip():
        raise ValueError("the text is empty; give a text file with some pages of running text.")
    input_ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :max_tokens]
    length = input_ids.shape[1]
    if length < min_tokens:
        raise ValueError(
            f"the text has {length} tokens for this model; it takes at least {min_tokens}, so give "
            "a longer text."
        )
    return Sample(input_ids, token_pieces(tokenizer, input_ids[0].tolist()))


def token_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> tuple[str, ...]:
    """Decodes each token on its own, with the space that belongs to it.

    Args:
        tokenizer: the model's tokenizer.
        token_ids: any tokens.

    Returns:
        One text for each token; joined they read as the text, but for characters that are spread
        over several tokens.
    """
    pieces = []
    for token in token_ids:
        # Decoders that drop a leading space drop it from the first token only.
        pair = str(tokenizer.decode([token, token], clean_up_tokenization_spaces=False))
        alone = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        pieces.append(pair[len(alone) :] if pair.startswith(alone) else alone)
    return tuple(pieces)
