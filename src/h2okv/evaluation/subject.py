"""The model that is evaluated, with all that its results must say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache.fingerprint import fingerprint

_SHORT = 12


@dataclass(frozen=True)
class Subject:
    """A model and its tokenizer.

    Attributes:
        model: Loaded, in evaluation mode.
        tokenizer: Its tokenizer.
        name: What the user calls it.
        window: The most tokens that it can read and write at their original positions; None for
            no fixed limit.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    window: int | None

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        return self.model.config

    @property
    def pad_token_id(self) -> int:
        """What fills the shorter rows of a batch; masked, so that any token will do."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Turns a text into tokens.

        Args:
            text: The text.
            special: Whether to let it begin as the tokenizer lets texts begin (with BOS, for many).

        Returns:
            The tokens.

        Raises:
            ValueError: If the tokenizer is not the model's.
        """
        ids = list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        vocab_size = self.config.get_text_config().vocab_size
        if ids and max(ids) >= vocab_size:
            raise ValueError(
                f"the tokenizer gives token {max(ids)}, but the model knows only {vocab_size}; get"
                " the model again, with its own tokenizer"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turns tokens into a text, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def identity(self) -> dict[str, str]:
        """Says which model it is.

        Returns:
            Its name, its revision (the Hub's commit, or a digest of the weights in a folder), and
            its data type.
        """
        revision = getattr(self.config, "_commit_hash", None)
        if revision is None:
            digest = fingerprint(self.model)
            revision = "" if digest is None else f"weights-{digest[:_SHORT]}"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"model": self.name, "revision": revision, "dtype": dtype}
