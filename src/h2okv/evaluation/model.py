"""The model under test and its caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.validation import check_positions, context_window
from h2okv.config import CacheConfig
from h2okv.policy import get_policy
from h2okv.provenance import fingerprint

_ROLLING_BLOCK = 512
_SHORT = 12


def settled(config: CacheConfig, model_config: PreTrainedConfig) -> CacheConfig:
    """What a cache is made with: a full one has few options, rolling positions need blocks.

    Args:
        config: As the user has it.
        model_config: The model's config.

    Returns:
        The same, with the blocks that rolling positions need: 512 tokens or a quarter of the
        context window, unless ``prefill_chunk`` says otherwise.
    """
    if config.is_full:
        return CacheConfig(**config.identity())
    if config.prefill_chunk is not None or config.positions != "rolling":
        return config
    window = context_window(model_config)
    block = _ROLLING_BLOCK if window is None else max(1, min(_ROLLING_BLOCK, window // 4))
    return replace(config, prefill_chunk=block)


def make_cache(config: CacheConfig, model_config: PreTrainedConfig, seed: int = 0) -> H2OCache:
    """Makes an empty cache; where each query chooses for itself, by masking.

    Args:
        config: Which cache.
        model_config: The model's config.
        seed: For policies that draw at random.

    Returns:
        The cache.

    Raises:
        ValueError: If the budget, policy or model makes no sense.
    """
    # Nothing can be dropped that another query may choose.
    simulate = get_policy(config.policy).per_query
    own = settled(config, model_config).seeded(seed)
    return H2OCache.from_config(model_config, own, simulate=simulate)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, vocab_size: int, special: bool = True
) -> list[int]:
    """Tokenizes a text, with special tokens or without; refuses another model's tokenizer."""
    ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    if ids and max(ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {max(ids)}, but the model knows only {vocab_size}; get the"
            " model again, with its own tokenizer"
        )
    return ids


class ModelUnderTest:
    """A model with its tokenizer; its weights are loaded when they are first needed.

    Args:
        load: Loads the weights, ready to generate.
        config: The model's config.
        tokenizer: Its tokenizer.
        name: What the user calls it.
        window: The most tokens that it can read and write at their original positions; ``None``
            for no fixed limit.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        window: int | None,
    ) -> None:
        self._load = load
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.window = window

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, in evaluation mode."""
        return self._load()

    @property
    def pad_token_id(self) -> int:
        """What fills the shorter sequences of a batch; masked, so that any token will do."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokenizes a text."""
        vocab_size = self.config.get_text_config().vocab_size
        return tokenize(self.tokenizer, text, vocab_size, special)

    def decode(self, ids: Sequence[int]) -> str:
        """Detokenizes, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def identity(self) -> dict[str, str]:
        """Which model it is, for results."""
        revision = getattr(self.model.config, "_commit_hash", None)
        if revision is None:
            weights = fingerprint(self.model)
            revision = "" if weights is None else f"weights-{weights[:_SHORT]}"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"model": self.name, "revision": revision, "dtype": dtype}

    def too_long(self, config: CacheConfig, tokens: int) -> str | None:
        """Why the model cannot read and write so many tokens with a cache; ``None`` if it can."""
        trained = context_window(self.config)
        own = settled(config, self.config)
        if own.positions == "rolling":
            held, block = own.entries(tokens), own.prefill_chunk or tokens
            if trained is not None and tokens > trained and held + block > trained:
                return (
                    f"a budget of {held} entries and blocks of {block} tokens are more than the"
                    f" context window of {trained}; give a smaller budget or a smaller prefill"
                    " chunk"
                )
            return None
        if self.window is None or tokens <= self.window or own.positions == "clamped":
            return None
        if own.prefill_chunk is not None and not self._has_learned_positions:
            return None  # asked for: the text is read on past the window, in blocks
        remedy = "use a cache of fixed size with --positions rolling"
        if not own.is_full:
            remedy = "add --positions rolling or --prefill-chunk 512"
        return f"that is more than the model's context window of {self.window}; {remedy}"

    @property
    def _has_learned_positions(self) -> bool:
        """Whether there are no positions past the last one."""
        try:
            check_positions(self.config, "clamped", get_policy("h2o"))
        except ValueError:
            return False
        return True
