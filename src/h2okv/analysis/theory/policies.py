"""Eviction on a small matrix of attention: the library's own cache, Belady, the best of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations

import numpy as np
import torch
from transformers import LlamaConfig

from h2okv.analysis.theory.objectives import set_values
from h2okv.budget import TokenBudget
from h2okv.cache import H2OCache
from h2okv.integration.hf import h2o_attention


def attention_rows(logits: np.ndarray) -> np.ndarray:
    """Turns logits into rows of causal attention.

    Args:
        logits: ``[G, n, n]``.

    Returns:
        float64 ``[G, n, n]``; each row adds up to 1 and is 0 after the diagonal.
    """
    size = logits.shape[-1]
    masked = np.where(np.tri(size, dtype=bool), logits, -np.inf)
    weights = np.exp(masked - masked.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def cache_sets(logits: np.ndarray, policy: str, budget: TokenBudget) -> np.ndarray:
    """Lets the library's own cache evict on given logits, one token at a time.

    Queries are the logits' rows and keys are unit vectors, so that the attention computes exactly
    these logits, and its softmax runs over what is held.

    Args:
        logits: ``[G, n, n]``, one matrix for each query head of the group.
        policy: a policy's name.
        budget: in tokens.

    Returns:
        bool ``[n, n]``: row i marks what is held after token i.
    """
    group, size, _ = logits.shape
    queries = torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float32))
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=group, num_key_value_heads=1)
    cache = H2OCache(config, budget.heavy, budget.recent, budget.sink, policy=policy)
    module = torch.nn.Module()
    held = np.zeros((size, size), dtype=bool)
    for step in range(size):
        key = torch.zeros(1, 1, 1, size)
        key[..., step] = 1.0
        marked_key, value = cache.update(key, torch.zeros(1, 1, 1, 1), 0)
        h2o_attention(module, queries[None, :, step : step + 1], marked_key, value, None, 1.0)
        positions = cache.kept_positions(0)[0, 0].numpy()
        held[step, positions[positions >= 0]] = True
    return held


def informed_sets(rows: np.ndarray, kept: int, objective: str, h: str) -> np.ndarray:
    """Greedy that sees full attention: it drops what the objective misses least at that step.

    It can be wrong only because what is gone stays gone; `cache_sets` also counts attention only
    over what it holds.

    Args:
        rows: as in `set_values`.
        kept: entries that stay.
        objective: one of `OBJECTIVES`.
        h: one of `CONCAVE`.

    Returns:
        bool ``[n, n]`` as in `cache_sets`.
    """

    def choose(held: np.ndarray, step: int) -> int:
        candidates = np.flatnonzero(held)
        without = np.repeat(held[None], len(candidates), axis=0)
        without[np.arange(len(candidates)), candidates] = False
        return int(candidates[set_values(rows, without, step, objective, h).argmax()])

    return _evict(rows.shape[-1], kept, choose)


def belady_sets(rows: np.ndarray, kept: int) -> np.ndarray:
    """Belady's rule for attention: drops what later queries attend to least in all.

    Belady's algorithm (1966) drops the page whose next use is farthest away. Attention uses every
    entry a little, so the attention that is still to come takes the place of the next use.

    Args:
        rows: as in `set_values`.
        kept: entries that stay.

    Returns:
        bool ``[n, n]`` as in `cache_sets`.
    """
    total = rows.sum(axis=0)

    def choose(held: np.ndarray, step: int) -> int:
        candidates = np.flatnonzero(held)
        return int(candidates[total[step + 1 :, candidates].sum(axis=0).argmin()])

    return _evict(rows.shape[-1], kept, choose)


def _evict(size: int, kept: int, choose: Callable[[np.ndarray, int], int]) -> np.ndarray:
    """Runs a rule that names the token to drop whenever there is one too many."""
    held = np.zeros(size, dtype=bool)
    after = np.zeros((size, size), dtype=bool)
    for step in range(size):
        held[step] = True
        if held.sum() > kept:
            held[choose(held, step)] = False
        after[step] = held
    return after


@lru_cache(maxsize=64)
def all_sets(size: int, kept: int, width: int) -> np.ndarray:
    """Lists every set of tokens.

    Args:
        size: the tokens are 0 to size - 1.
        kept: tokens in a set.
        width: columns of the result.

    Returns:
        bool ``[C(size, kept), width]``; do not change it, it is shared.
    """
    chosen = np.array(list(combinations(range(size), kept)))
    members = np.zeros((len(chosen), width), dtype=bool)
    np.put_along_axis(members, chosen, True, axis=1)
    return members


def best_value(
    rows: np.ndarray, kept: int, step: int, objective: str, h: str
) -> tuple[float, np.ndarray]:
    """Finds the best of all sets of a size after a step, by trying every one.

    Args:
        rows: as in `set_values`.
        kept: tokens in a set.
        step: the newest token, from 0.
        objective: one of `OBJECTIVES`.
        h: one of `CONCAVE`.

    Returns:
        Its worth, and the set as bool ``[n]``.
    """
    members = all_sets(step + 1, kept, rows.shape[-1])
    values = set_values(rows, members, step, objective, h)
    place = int(values.argmax())
    return float(values[place]), members[place]


def retained_mass(rows: np.ndarray, held: np.ndarray) -> float:
    """The mean share of full attention that falls on what a query can still see.

    Args:
        rows: as in `set_values`.
        held: bool ``[n, n]`` as in `cache_sets`.

    Returns:
        A share; the rows before the first eviction count too.
    """
    size = rows.shape[-1]
    seen = np.eye(size, dtype=bool)
    seen[1:] |= held[:-1]
    return float((rows.mean(axis=0) * seen).sum() / size)


def best_retained_mass(rows: np.ndarray, kept: int) -> float:
    """The most attention that any way of evicting can retain, over all of them.

    Dynamic programming over the kept sets: the answer for a set after a step is the best over the
    sets it can come from by taking in the newest token and dropping one.

    Args:
        rows: as in `set_values`.
        kept: entries that stay.

    Returns:
        A share, as in `retained_mass`.
    """
    mean = rows.mean(axis=0)
    size = len(mean)
    states: dict[int, float] = {0: 0.0}
    for step in range(size):
        later: dict[int, float] = {}
        for held, mass in states.items():
            seen = held | 1 << step
            members = [token for token in range(step + 1) if seen >> token & 1]
            gained = mass + mean[step, members].sum()
            full = len(members) > kept
            for result in [seen & ~(1 << token) for token in members] if full else [seen]:
                if gained > later.get(result, -1.0):
                    later[result] = gained
        states = later
    return float(max(states.values()) / size)
