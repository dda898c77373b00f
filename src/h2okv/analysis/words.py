"""Accumulated score against how words stand together in the text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from h2okv.analysis.power_law import load_scipy

_RESAMPLES = 1000
REACH = 5
"""Two words stand together if at most this many tokens apart."""


@dataclass(frozen=True)
class Words:
    """Every word of the vocabulary that occurs in a text.

    Attributes:
        token_ids: int ``[W]``.
        count: int ``[W]``, how often each occurs.
        together: int ``[W]``, how often another word stands within `REACH` tokens of it.
        neighbours: int ``[W]``, how many different words do.
        place: int ``[T]``, the word of each token of the text.
    """

    token_ids: np.ndarray
    count: np.ndarray
    together: np.ndarray
    neighbours: np.ndarray
    place: np.ndarray


def count_words(token_ids: np.ndarray, reach: int = REACH) -> Words:
    """Counts words and what stands near them.

    Args:
        token_ids: int ``[T]``.
        reach: the largest distance, in tokens.

    Returns:
        The counts.
    """
    found, place, count = np.unique(token_ids, return_inverse=True, return_counts=True)
    together = np.zeros(len(found), dtype=np.int64)
    pairs = []
    for distance in range(1, reach + 1):
        left, right = place[:-distance], place[distance:]
        other = left != right
        np.add.at(together, left[other], 1)
        np.add.at(together, right[other], 1)
        pairs += [left[other] * len(found) + right[other], right[other] * len(found) + left[other]]
    distinct = np.unique(np.concatenate(pairs))
    neighbours = np.bincount(distinct // len(found), minlength=len(found))
    return Words(found, count, together, neighbours, place)


def by_word(scores: np.ndarray, words: Words) -> np.ndarray:
    """Adds up the scores of a word's tokens.

    Args:
        scores: float ``[..., T]``.
        words: from `count_words`.

    Returns:
        float64 ``[..., W]``.
    """
    flat = scores.reshape(-1, scores.shape[-1])
    size = len(words.count)
    sums = np.stack([np.bincount(words.place, row, minlength=size) for row in flat])
    return sums.reshape(*scores.shape[:-1], size)


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rank correlation.

    Attributes:
        rho: the coefficient.
        low: lower end of its 95 % interval (bootstrap over words).
        high: upper end.
        words: how many words were compared.
    """

    rho: float
    low: float
    high: float
    words: int


def spearman(first: np.ndarray, second: np.ndarray, seed: int = 0) -> RankCorrelation:
    """Correlates two rankings.

    Args:
        first: float ``[W]``.
        second: float ``[W]``.
        seed: for the interval.

    Returns:
        The correlation.
    """
    stats = load_scipy("stats")
    ranks = np.stack([stats.rankdata(first), stats.rankdata(second)])
    size = ranks.shape[1]
    draws = np.random.default_rng(seed).integers(0, size, (_RESAMPLES, size))
    # Ranks are not taken anew in each draw: it changes ties only, and takes ten times as long.
    drawn = ranks[:, draws]
    centred = drawn - drawn.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).sum(axis=-1)).prod(axis=0)
    product = (centred[0] * centred[1]).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        values = np.where(spread > 0, product / spread, 0.0)
    low, high = np.quantile(values, (0.025, 0.975))
    rho = float(np.corrcoef(ranks)[0, 1]) if ranks.std(axis=1).all() else 0.0
    return RankCorrelation(rho, float(low), float(high), size)
