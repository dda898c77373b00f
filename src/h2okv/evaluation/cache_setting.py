"""A cache setting and the model under test."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import h2okv
from h2okv.cache.validation import check_positions, context_window
from h2okv.config import POSITIONS, Budget, Positions
from h2okv.policy import get_policy
from h2okv.provenance import fingerprint

OPTIONAL = ("scoring", "decay", "kv_bits")
"""What a cache may be given beyond policy and budget."""
_CHUNK = 512


@dataclass(frozen=True)
class CacheSetting:
    """A policy and the whole budget that it divides.

    Attributes:
        policy: A name of `h2okv.policy_names()`.
        budget: Tokens (int) or a fraction of the prompt (float); None, or a fraction of 1, keeps
            everything.
        heavy_share: How much of the budget is for heavy hitters; the rest is for recent tokens.
        sink: First tokens to keep, beyond the budget.
        positions: How entries are placed; a cache that keeps everything has original ones.
        prefill_chunk: The most tokens that are read at once; None for all, with rolling positions
            for 512 or a quarter of the window.
        more: Further arguments of `H2OCache`, of `OPTIONAL`.
    """

    policy: str = "h2o"
    budget: int | float | None = None
    heavy_share: float = 0.5
    sink: int = 0
    positions: Positions = "original"
    prefill_chunk: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses what no cache can be made with."""
        if not 0 <= self.heavy_share <= 1:
            raise ValueError(
                f"heavy_share={self.heavy_share:g} is no share of the budget; give 0 to 1"
            )
        if self.positions not in POSITIONS:
            raise ValueError(
                f"positions={self.positions!r} is unknown; choose one of {', '.join(POSITIONS)}"
            )
        budget = self.budget
        if isinstance(budget, float) and not 0 < budget <= 1:
            raise ValueError(
                f"budget {budget:g} is out of range; give a fraction above 0 and up to 1, tokens"
                " (64), or full"
            )
        if isinstance(budget, int) and budget < 2:
            raise ValueError(f"budget {budget} is too small; give 2 tokens or more, or a fraction")

    @property
    def is_full(self) -> bool:
        """Whether it keeps everything."""
        return self.budget is None or self.budget == 1.0 or self.policy == "full"

    @property
    def budget_label(self) -> str:
        """The budget as tables call it."""
        if self.is_full:
            return "full"
        share = isinstance(self.budget, float)
        return f"{100 * self.budget:g}%" if share and self.budget else str(self.budget)

    @property
    def policy_label(self) -> str:
        """The policy as tables call it, with what it does not have by default."""
        parts = ["full" if self.is_full else self.policy]
        if not self.is_full:
            if self.heavy_share != 0.5:
                parts.append(f"heavy {100 * self.heavy_share:g}%")
            if self.sink:
                parts.append(f"sink {self.sink}")
        parts += [f"{name} {value}" for name, value in sorted(self.more.items())]
        return ", ".join(parts)

    @property
    def label(self) -> str:
        """Policy and budget, as a progress bar shows them."""
        if self.is_full:
            return self.policy_label
        return f"{self.policy_label}, {self.budget_label}"

    def identity(self) -> dict[str, Any]:
        """All that a result depends on, by name; what does not matter to a full cache is empty."""
        rolls = not self.is_full
        return {
            "policy": "full" if self.is_full else self.policy,
            "budget": self.budget_label,
            "heavy_share": self.heavy_share if rolls else None,
            "sink": self.sink if rolls else None,
            "positions": self.positions if rolls else "original",
            "prefill_chunk": self.prefill_chunk,
            **{name: self.more.get(name) for name in OPTIONAL},
        }

    def options(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Says it in the words of `H2OCache`."""
        missing = self.missing()
        if missing:
            raise ValueError(
                f"this version of h2okv has no {missing[0]} for its cache; leave it out, or get a"
                " newer version"
            )
        if self.is_full:
            return {"policy": "full", "prefill_chunk": self.prefill_chunk, **self.more}
        assert self.budget is not None
        share: float | int = self.budget * self.heavy_share
        heavy = share if isinstance(self.budget, float) else int(share)
        return {
            "heavy": heavy,
            "recent": self.budget - heavy,
            "sink": self.sink,
            "policy": self.policy,
            "positions": self.positions,
            "prefill_chunk": self.chunk(config),
            # Where each query chooses for itself, nothing can be dropped, only masked.
            **({"simulate": True} if getattr(get_policy(self.policy), "per_query", False) else {}),
            **self.more,
        }

    def missing(self) -> list[str]:
        """Names the options that this version's cache does not have."""
        known = inspect.signature(h2okv.H2OCache).parameters
        return [name for name in self.more if name not in known]

    def chunk(self, config: PreTrainedConfig) -> int | None:
        """The most tokens that are read at once."""
        window = context_window(config)
        if self.prefill_chunk is not None or self.is_full or self.positions != "rolling":
            return self.prefill_chunk
        return _CHUNK if window is None else max(1, min(_CHUNK, window // 4))

    def make(self, config: PreTrainedConfig, seed: int) -> h2okv.H2OCache:
        """Makes the cache, empty."""
        return h2okv.H2OCache(config, seed=seed, **self.options(config))

    def too_long(self, config: PreTrainedConfig, window: int | None, tokens: int) -> str | None:
        """Says why the model cannot read and write so many tokens with this cache."""
        trained = context_window(config)
        if not self.is_full and self.positions == "rolling":
            options = self.options(config)
            held = Budget(options["heavy"], options["recent"], self.sink).resolve(tokens).total
            most = held + (options["prefill_chunk"] or tokens)
            if trained is not None and tokens > trained and most > trained:
                return (
                    f"a budget of {held} entries and blocks of {most - held} tokens are more than"
                    f" the context window of {trained}; give a smaller budget or a smaller"
                    " prefill chunk"
                )
            return None
        if window is None or tokens <= window or (self.positions == "clamped" and not self.is_full):
            return None
        if self.prefill_chunk is not None and not _is_learned(config):
            return None  # asked for: the text is read on past the window, in blocks
        remedy = "have a cache of fixed size with --positions rolling"
        if not self.is_full:
            remedy = "add --positions rolling or --prefill-chunk 512"
        return f"that is more than the model's window of {window}; {remedy}, or --too-long skip"


def _is_learned(config: PreTrainedConfig) -> bool:
    """Tells whether positions are learned, so that there are none past the last one."""
    try:
        check_positions(config, "clamped", get_policy("h2o"))
    except ValueError:
        return False
    return True


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
        """Turns a text into tokens."""
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
        """Says which model it is."""
        revision = getattr(self.config, "_commit_hash", None)
        if revision is None:
            digest = fingerprint(self.model)
            revision = "" if digest is None else f"weights-{digest[:_SHORT]}"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"model": self.name, "revision": revision, "dtype": dtype}
