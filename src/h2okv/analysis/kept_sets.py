"""How kept sets compare: between policies, heads and layers, and how long entries stay."""

from __future__ import annotations

import numpy as np

from h2okv.analysis.trace import held_after


def heavy_after(gone_at: np.ndarray, step: int, recent: int) -> np.ndarray:
    """Tells which tokens outside the recent window were held after a step.

    Args:
        gone_at: as in `Trace`.
        step: the newest token.
        recent: tokens of the recent window.

    Returns:
        bool ``[L, H, step + 1 - recent]``.
    """
    return held_after(gone_at, step)[..., : step + 1 - recent]


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The share of the first set that is in the second too.

    Args:
        first: bool ``[..., N]``.
        second: bool ``[..., N]``.

    Returns:
        float ``[...]``; NaN for an empty first set.
    """
    size = first.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (first & second).sum(axis=-1) / size


def similarity(sets: np.ndarray) -> np.ndarray:
    """Jaccard similarity of every pair of sets: common tokens by tokens in either.

    Args:
        sets: bool ``[S, N]``.

    Returns:
        float ``[S, S]``.
    """
    numbers = sets.astype(np.float64)
    common = numbers @ numbers.T
    sizes = numbers.sum(axis=-1)
    either = sizes[:, None] + sizes[None] - common
    return np.divide(common, either, out=np.ones_like(common), where=either > 0)


def chance_similarity(kept: int, candidates: int) -> float:
    """The Jaccard similarity that two random sets of one size have on average, nearly.

    Args:
        kept: size of each set.
        candidates: how many tokens there are to choose from.
    """
    common = kept * kept / candidates
    return common / (2 * kept - common)


def stays(gone_at: np.ndarray, recent: int, first: int) -> np.ndarray:
    """How long entries stayed after they left the recent window, in tokens.

    Args:
        gone_at: as in `Trace`.
        recent: tokens of the recent window; each entry is safe in it.
        first: tokens read at once; nothing was evicted while they were read.

    Returns:
        int ``[L, H, T']`` for the tokens that left the window in time to be evicted, with 0 for
        those that went at once. Entries still held at the end have the time until then.
    """
    length = gone_at.shape[-1]
    # At the step at which a token leaves the window it can go for the first time.
    leaves = np.maximum(np.arange(length) + recent, first)
    candidates = leaves < length
    return (np.minimum(gone_at, length) - 1 - leaves)[..., candidates].clip(min=0)
