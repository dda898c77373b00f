"""Distributions of scores: power laws and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from h2okv.console import optional
from h2okv_lab.tables import Row

_CANDIDATES = 40
_LEAST_TAIL = 30
LEAST_VALUES = 2 * _LEAST_TAIL  # fewer positive ones are refused
_DRAWS = 200


def load_scipy(module: str) -> Any:
    """Import a module of scipy."""
    return optional(f"scipy.{module}", "the analysis", "analysis")


def fit_power_law(values: np.ndarray, seed: int = 0, draws: int = _DRAWS) -> Row:
    """Fit ``p(x) ~ x ** -exponent`` from ``start`` on (Clauset et al., arXiv 0706.1062).

    ``p_value`` is the fraction of samples from the fitted law with a larger Kolmogorov-Smirnov
    ``distance`` to their fit: below 0.1 the law is not plausible. ``log_ratio`` compares it with a
    log-normal tail (Vuong's test, p value ``log_ratio_p``).
    """
    ordered = np.sort(values[values > 0].astype(np.float64))
    if len(ordered) < LEAST_VALUES:
        raise ValueError(
            f"a power law needs at least {LEAST_VALUES} positive values, got {len(ordered)}; give "
            "a longer text."
        )
    first, exponent, distance = _best_tail(ordered)
    tail = ordered[first:]
    generator = np.random.default_rng(seed)
    farther = 0
    for _ in range(draws):
        in_tail = int(generator.binomial(len(ordered), len(tail) / len(ordered)))
        samples = tail[0] * (1 - generator.random(in_tail)) ** (-1 / (exponent - 1))
        body = ordered[:first] if first else tail[:1]
        below = generator.choice(body, len(ordered) - in_tail)
        farther += _best_tail(np.sort(np.concatenate([below, samples])))[2] >= distance
    log_ratio, log_ratio_p = _against_lognormal(tail, exponent)
    return {
        "values": len(ordered), "tail": len(tail), "start": float(tail[0]), "exponent": exponent,
        "exponent_error": (exponent - 1) / np.sqrt(len(tail)), "distance": distance,
        "p_value": farther / draws if draws else float("nan"), "log_ratio": log_ratio,
        "log_ratio_p": log_ratio_p,
    }  # fmt: skip


def _best_tail(ordered: np.ndarray) -> tuple[int, float, float]:
    """Choose the start of the tail: first index, exponent, distance."""
    count = len(ordered)
    logs = np.log(ordered)
    sums = np.cumsum(logs[::-1])[::-1]
    starts = np.unique(np.linspace(0, count - _LEAST_TAIL, _CANDIDATES).astype(int))
    best = (0, 1.0, np.inf)
    for first in starts:
        size = count - first
        spread = sums[first] - size * logs[first]
        if spread <= 0:
            continue
        exponent = 1 + size / spread
        law = -np.expm1((1 - exponent) * (logs[first:] - logs[first]))
        empirical = np.arange(size + 1) / size
        distance = max(np.max(empirical[1:] - law), np.max(law - empirical[:-1]))
        if distance < best[2]:
            best = (int(first), float(exponent), float(distance))
    return best


def _against_lognormal(tail: np.ndarray, exponent: float) -> tuple[float, float]:
    """Run Vuong's test of the power law against a log-normal with the same start."""
    stats = load_scipy("stats")
    logs = np.log(tail / tail[0])
    law = np.log(exponent - 1) - exponent * logs

    def normal(parameters: np.ndarray) -> np.ndarray:
        centre, width = parameters[0], np.exp(parameters[1])
        return stats.truncnorm.logpdf(logs, -centre / width, np.inf, centre, width) - logs

    fit = load_scipy("optimize").minimize(
        lambda parameters: -normal(parameters).sum(),
        [logs.mean(), np.log(logs.std() + 1e-9)],
        method="Nelder-Mead",
        # Without bounds the fit may diverge towards the power law, a log-normal's limit.
        bounds=[(-50.0, 50.0), (-6.0, 4.0)],
    )
    gaps = law - normal(fit.x)
    spread = float(gaps.std() * np.sqrt(len(gaps)))
    chance = float(2 * stats.norm.sf(abs(gaps.sum()) / spread)) if spread > 0 else 1.0
    return float(gaps.sum()), chance


_RESAMPLES = 1000
REACH = 5  # two words co-occur if at most this many tokens apart


@dataclass(frozen=True)
class Words:
    """Every word of the vocabulary that occurs in a text; int ``[W]`` each but the last."""

    token_ids: np.ndarray
    count: np.ndarray  # occurrences
    together: np.ndarray  # co-occurrences: other words within `REACH` tokens
    neighbours: np.ndarray  # number of different words among these
    index: np.ndarray  # int [T], the word of each token of the text


def count_words(token_ids: np.ndarray, reach: int = REACH) -> Words:
    """Count the words of token ids ``[T]``, and their co-occurrences within ``reach`` tokens."""
    token_values, index, count = np.unique(token_ids, return_inverse=True, return_counts=True)
    size, pairs = len(token_values), []
    for distance in range(1, reach + 1):
        left, right = index[:-distance], index[distance:]
        pairs += [left * size + right, right * size + left]
    near = np.concatenate(pairs)
    near = near[near // size != near % size]
    together = np.bincount(near // size, minlength=size)
    neighbours = np.bincount(np.unique(near) // size, minlength=size)
    return Words(token_values, count, together, neighbours, index)


def by_word(scores: np.ndarray, words: Words) -> np.ndarray:
    """Sum the scores ``[..., T]`` of each word's tokens: float64 ``[..., W]``."""
    size = len(words.count)
    return np.apply_along_axis(lambda row: np.bincount(words.index, row, size), -1, scores)


def spearman(first: np.ndarray, second: np.ndarray, seed: int = 0) -> Row:
    """Return Spearman's rank correlation of float ``[W]``, with a bootstrapped 95 % interval."""
    stats = load_scipy("stats")
    ranks = np.stack([stats.rankdata(first), stats.rankdata(second)])
    size = ranks.shape[1]
    draws = np.random.default_rng(seed).integers(0, size, (_RESAMPLES, size))
    # Ranks are not recomputed in each draw: that changes ties only and takes ten times as long.
    (rho,), values = (_correlations(x) for x in (ranks[:, None], ranks[:, draws]))
    low, high = np.quantile(values, (0.025, 0.975))
    return {"rho": float(rho), "low": float(low), "high": float(high), "words": size}


def _correlations(pairs: np.ndarray) -> np.ndarray:
    """Return the correlation of ``[2, N, W]`` for each of N; 0 where one side is constant."""
    centred = pairs - pairs.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).sum(axis=-1)).prod(axis=0)
    with np.errstate(invalid="ignore"):
        return np.where(spread > 0, centred.prod(axis=0).sum(axis=-1) / spread, 0.0)
