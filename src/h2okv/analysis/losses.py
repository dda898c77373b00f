"""How well a model foresaw each token, and what a change of it costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

_CHUNK = 256
_RESAMPLES = 2000
_BLOCK = 32
"""Tokens resampled together: the losses of neighbours depend on each other."""


def token_losses(logits: torch.Tensor, input_ids: torch.Tensor) -> np.ndarray:
    """Computes the loss of every token given those before it.

    Args:
        logits: ``[1, T, V]``.
        input_ids: int64 ``[1, T]``.

    Returns:
        float64 ``[T]`` in nats; NaN for the first token, which nothing foresees.
    """
    targets = input_ids[0, 1:].to(logits.device)
    parts = [
        F.cross_entropy(some_logits.float(), some_targets, reduction="none")
        for some_logits, some_targets in zip(
            logits[0, :-1].split(_CHUNK), targets.split(_CHUNK), strict=True
        )
    ]
    return np.concatenate([[np.nan], torch.cat(parts).cpu().numpy().astype(np.float64)])


@torch.inference_mode()
def dense_losses(model: PreTrainedModel, input_ids: torch.Tensor) -> np.ndarray:
    """Computes the losses with full attention; see `token_losses`."""
    logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    return token_losses(logits, input_ids)


@dataclass(frozen=True)
class Cost:
    """What a change of the attention does to perplexity.

    Attributes:
        perplexity: with the change.
        ratio: to the perplexity without it, on the same tokens.
        low: lower end of the ratio's 95 % interval.
        high: upper end.
    """

    perplexity: float
    ratio: float
    low: float
    high: float


def cost(losses: np.ndarray, baseline: np.ndarray, first: int = 1, seed: int = 0) -> Cost:
    """Compares losses token by token; the interval is a bootstrap over blocks of 32 tokens.

    It says how sure the figure is for texts like this one read by this model, not for others.

    Args:
        losses: float ``[T]`` in nats.
        baseline: float ``[T]``, without the change.
        first: the first token that counts.
        seed: for the bootstrap.

    Returns:
        The comparison.
    """
    changed, plain = losses[first:], baseline[first:]
    gaps = changed - plain
    blocks = [gaps[i : i + _BLOCK] for i in range(0, len(gaps), _BLOCK)]
    sums = np.array([block.sum() for block in blocks])
    counts = np.array([len(block) for block in blocks])
    draws = np.random.default_rng(seed).integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    return Cost(
        perplexity=float(np.exp(changed.mean())),
        ratio=float(np.exp(gaps.mean())),
        low=float(low),
        high=float(high),
    )
