"""A study's samples and results, resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.analysis.ablation import dense_losses
from h2okv.analysis.attention_stats import (
    Accumulation,
    Tick,
    full_attention_layers,
    no_tick,
    watch_rows,
)
from h2okv.analysis.eviction_trace import GlobalPolicy, follow, split_budget
from h2okv.policy import Policy

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
    """Turns the beginning of a text into tokens."""
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
    """Decodes each token on its own, with the space that belongs to it."""
    pieces = []
    for token in token_ids:
        # Decoders that drop a leading space drop it from the first token only.
        pair = str(tokenizer.decode([token, token], clean_up_tokenization_spaces=False))
        alone = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        pieces.append(pair[len(alone) :] if pair.startswith(alone) else alone)
    return tuple(pieces)


BUDGETS = (0.05, 0.1, 0.2, 0.4)
"""Shares of the text; all below one half, for the second half is what counts."""
POLICIES = ("h2o", "global", "recent", "sink_recent", "random")
DEFAULT_BUDGET = 0.2


class Study:
    """The subject of an analysis."""

    def __init__(self, model: PreTrainedModel, sample: Sample, folder: Path | None = None) -> None:
        self.model, self.sample, self.folder = model, sample, folder
        self.layers = full_attention_layers(model.config)
        self._known: dict[str, dict[str, np.ndarray]] = {}

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.sample.length

    @property
    def half(self) -> int:
        """The first token of the second half, on which policies are compared."""
        return self.length // 2

    def tokens(self, share: float) -> int:
        """Turns a share of the text into tokens, at least 2."""
        return max(2, int(share * self.length))

    def recent(self, share: float) -> int:
        """The recent window of a budget."""
        return split_budget(self.tokens(share)).recent

    def accumulated(self, tick: Tick = no_tick) -> np.ndarray:
        """Returns the attention that each token receives: float32 ``[L, H, G, T]``."""

        def compute() -> dict[str, np.ndarray]:
            watcher = Accumulation()
            watch_rows(self.model, self.sample.input_ids, [watcher], tick)
            return {"scores": watcher.scores()}

        return self._once("accumulated", compute)["scores"]

    def dense_losses(self) -> np.ndarray:
        """Returns the losses with full attention: float64 ``[T]``."""
        return self._once(
            "dense", lambda: {"losses": dense_losses(self.model, self.sample.input_ids)}
        )["losses"]

    def gone_at(self, policy: str, share: float, tick: Tick = no_tick) -> np.ndarray:
        """Returns when each token went; see `Trace`."""
        return self._run(policy, share, tick)["gone_at"]

    def losses(self, policy: str, share: float, tick: Tick = no_tick) -> np.ndarray:
        """Returns the losses under a policy: float ``[T]``, NaN at the beginning."""
        return self._run(policy, share, tick)["losses"].astype(np.float64)

    def _run(self, policy: str, share: float, tick: Tick) -> dict[str, np.ndarray]:
        def compute() -> dict[str, np.ndarray]:
            ranks: str | Policy = policy
            if policy == GlobalPolicy.name:
                ranks = GlobalPolicy(self.accumulated().sum(axis=2), self.layers)
            budget = split_budget(self.tokens(share))
            trace = follow(self.model, self.sample.input_ids, ranks, budget, tick=tick)
            return {"gone_at": trace.gone_at, "losses": trace.losses}

        return self._once(f"{policy}-{share:g}", compute)

    def _once(
        self, name: str, compute: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Computes arrays, or finds them from before in memory or in the folder."""
        if name in self._known:
            return self._known[name]
        path = None if self.folder is None else self.folder / f"{name}.npz"
        if path is not None and path.is_file():
            with np.load(path) as held:
                self._known[name] = dict(held)
            return self._known[name]
        arrays = compute()
        if path is not None:
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            partial.replace(path)
        self._known[name] = arrays
        return arrays
