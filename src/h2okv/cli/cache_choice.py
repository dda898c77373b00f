"""The cache that the user asked for."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import DynamicCache, PreTrainedConfig

import h2okv
from h2okv.cache.positions import Positions


@dataclass(frozen=True)
class CacheChoice:
    """A policy and its budget.

    Attributes:
        policy: A name of `h2okv.policy_names()`.
        heavy: Heavy hitters, in tokens (int) or as a fraction of the prompt (float).
        recent: Newest tokens, in tokens or as a fraction.
        sink: First tokens.
        positions: `original`, `rolling` or `clamped`.
        prefill_chunk: The most tokens that are read at once; None for no limit.
        scoring: What attention counts for, one of `h2okv.policy.scoring.SCORINGS`.
        decay: The factor of `decay`; None for the default, or with another scoring.
        kv_bits: Bits of a number of keys and values, 8 or 4; None for the model's own.
    """

    policy: str
    heavy: int | float
    recent: int | float
    sink: int
    positions: Positions = "original"
    prefill_chunk: int | None = None
    scoring: str = "sum"
    decay: float | None = None
    kv_bits: int | None = None

    def make(self, config: PreTrainedConfig, seed: int) -> h2okv.H2OCache:
        """Makes the cache, empty.

        Args:
            config: The model's configuration.
            seed: For policies that draw at random.

        Returns:
            The cache.

        Raises:
            ValueError: If the policy or the scoring is unknown, or the budget makes no sense.
        """
        return h2okv.H2OCache(
            config,
            heavy=self.heavy,
            recent=self.recent,
            sink=self.sink,
            policy=self.policy,
            positions=self.positions,
            prefill_chunk=self.prefill_chunk,
            scoring=self.scoring,
            decay=self.decay,
            kv_bits=self.kv_bits,
            seed=seed,
        )

    @property
    def label(self) -> str:
        """What tables call it."""
        bits = "" if self.kv_bits is None else f", {self.kv_bits} bits"
        if self.policy == "full":
            return f"policy full{bits}"
        sink = f" + sink {self.sink}" if self.sink else ""
        scoring = "" if self.scoring == "sum" else f" by {self.scoring}"
        if self.decay is not None:
            scoring += f" {self.decay:g}"
        return f"{self.policy}{scoring}, heavy {self.heavy} + recent {self.recent}{sink}{bits}"


def full_cache(config: PreTrainedConfig) -> DynamicCache:
    """Makes the cache that transformers uses by itself, which keeps everything.

    Args:
        config: The model's configuration.

    Returns:
        The cache, empty.
    """
    return DynamicCache(config=config)
