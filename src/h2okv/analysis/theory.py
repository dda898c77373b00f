"""The paper's theorem by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations, product

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel

from h2okv.analysis.attention_stats import (
    LayerAttention,
    Tick,
    full_attention_layers,
    no_tick,
    of_layers,
)
from h2okv.analysis.eviction_trace import split_budget
from h2okv.analysis.study import DEFAULT_BUDGET, Study, Tables, tabulate
from h2okv.cache import H2OCache
from h2okv.config import TokenBudget
from h2okv.integration.attention import h2o_attention
from h2okv.records import Row

_MOST_LAYERS = 8

# A small matrix of attention, logits float64 [G, n, n], after the columns that name it: `case` is
# `real`, or what is adversarial about it; then layer, KV head and excerpt are -1.
Case = tuple[Row, np.ndarray]


def real_cases(
    model: PreTrainedModel, input_ids: torch.Tensor, size: int, excerpts: int
) -> list[Case]:
    """Read short excerpts, so that each row of attention is there from its first token on."""

    def look(layer: LayerAttention) -> np.ndarray:
        return layer.logits(0, size, torch.float64).cpu().numpy()

    starts = np.linspace(0, input_ids.shape[1] - size, excerpts).astype(int)
    found = [of_layers(model, input_ids[:, start : start + size], look) for start in starts]
    layers = full_attention_layers(model.config)
    places = np.unique(np.linspace(0, len(layers) - 1, _MOST_LAYERS).round().astype(int))
    return [
        ({"case": "real", "layer": layers[place], "head": head, "excerpt": excerpt}, logits)
        for excerpt, by_layer in enumerate(found)
        for place in places
        for head, logits in enumerate(by_layer[place])
    ]


def adversarial_cases(size: int, kept: int) -> list[Case]:
    """Make attention on which eviction by what has been must fail, or is put to the test."""
    # A token that nobody looks at on arrival, and everybody afterwards; first tokens that draw all
    # attention, and then none; the same few tokens with half of each row, the rest on one token
    # that is another one each time, so that all of the few cover no row better than one.
    star, bait, twins = np.full((3, size, size), 1e-4)
    for query in range(size):
        first = min(query + 1, kept)
        star[query, :first] = 0.05
        bait[query, slice(first) if query < size // 2 else slice(query - 2, query)] = 1.0
        twins[query, :first] = 0.5 / first
        twins[query, max(kept, query - 1)] = 0.5
    star[kept + 1 :, kept] = 1.0
    weights = {"late star": star, "bait": bait, "twins": twins, "even": np.ones((size, size))}
    nowhere = {"layer": -1, "head": -1, "excerpt": -1}
    return [({"case": name, **nowhere}, np.log(rows)[None]) for name, rows in weights.items()]


# Functions h: growing, concave, 0 at 0.
CONCAVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": np.positive, "sqrt": np.sqrt, "log": np.log1p,
}  # fmt: skip
# What h is applied to: each token's accumulated attention, their sum, or each row's kept mass.
OBJECTIVES = ("tokens", "total", "rows")


def set_values(
    rows: np.ndarray, members: np.ndarray, step: int, objective: str, h: str
) -> np.ndarray:
    """The worth of sets, bool ``[S, n]``, after a step by one of `OBJECTIVES`: float64 ``[S]``."""
    concave = CONCAVE[h]
    seen = rows[:, : step + 1]
    sets = members.astype(np.float64)
    if objective == "rows":
        covered = np.einsum("gqs,ms->mgq", seen, sets, optimize=True)
        return concave(covered).sum(axis=(1, 2))
    received = seen.sum(axis=(0, 1))
    if objective == "total":
        return concave(sets @ received)
    return sets @ concave(received)


def attention_rows(logits: np.ndarray) -> np.ndarray:
    """Turn logits ``[G, n, n]`` into rows of causal attention, float64 ``[G, n, n]``."""
    masked = np.where(np.tri(logits.shape[-1], dtype=bool), logits, -np.inf)
    return torch.from_numpy(masked).softmax(dim=-1).numpy()


def cache_sets(logits: np.ndarray, policy: str, budget: TokenBudget) -> np.ndarray:
    """What the library's own cache holds on given logits ``[G, n, n]`` by step: bool ``[n, n]``."""
    group, size, _ = logits.shape
    queries = torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float32))
    config = LlamaConfig(
        hidden_size=group, num_hidden_layers=1, num_attention_heads=group, num_key_value_heads=1
    )
    cache = H2OCache(config, budget.heavy, budget.recent, budget.sink, policy=policy)
    module = torch.nn.Module()
    held = np.zeros((size, size), dtype=bool)
    for step in range(size):
        key = torch.zeros(1, 1, 1, size)
        key[..., step] = 1.0  # a unit vector, so that attention computes exactly these logits
        marked_key, value = cache.update(key, torch.zeros(1, 1, 1, 1), 0)
        row = queries[None, :, step : step + 1]
        h2o_attention(module, row, marked_key, value, None, scaling=1.0)
        positions = cache.kept_positions(0)[0, 0].numpy()
        held[step, positions[positions >= 0]] = True
    return held


def informed_sets(rows: np.ndarray, kept: int, objective: str, h: str) -> np.ndarray:
    """Greedy that sees full attention, not only over what it holds: drops what is missed least."""

    def without(held: np.ndarray, step: int) -> np.ndarray:
        sets = held & ~np.eye(len(held), dtype=bool)[held]
        return set_values(rows, sets, step, objective, h)

    return _evict(rows.shape[-1], kept, without)


def belady_sets(rows: np.ndarray, kept: int) -> np.ndarray:
    """Belady's rule (1966) for attention: drops what later queries attend to least in all."""
    total = rows.sum(axis=0)
    return _evict(len(total), kept, lambda held, step: -total[step + 1 :, held].sum(axis=0))


def _evict(size: int, kept: int, without: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Evicts by the worth of what is held, bool ``[n]``, without each of its tokens in turn."""
    held = np.zeros(size, dtype=bool)
    after = np.zeros((size, size), dtype=bool)
    for step in range(size):
        held[step] = True
        if held.sum() > kept:
            held[np.flatnonzero(held)[without(held, step).argmax()]] = False
        after[step] = held
    return after


@lru_cache(maxsize=64)
def all_sets(size: int, kept: int, width: int) -> np.ndarray:
    """List every set of tokens, bool ``[C(size, kept), width]``; shared, so do not change it."""
    sets = combinations(np.eye(width, dtype=bool)[:size], kept)
    return np.array([np.any(members, axis=0) for members in sets])


def best_value(
    rows: np.ndarray, kept: int, step: int, objective: str, h: str
) -> tuple[float, np.ndarray]:
    """Find the best of all sets of a size after a step: its worth, and the set as bool ``[n]``."""
    members = all_sets(step + 1, kept, rows.shape[-1])
    values = set_values(rows, members, step, objective, h)
    return float(values.max()), members[values.argmax()]


def retained_mass(rows: np.ndarray, held: np.ndarray) -> float:
    """The mean fraction of full attention that falls on what a query can still see."""
    size = rows.shape[-1]
    seen = np.eye(size, dtype=bool)
    seen[1:] |= held[:-1]
    return float((rows.mean(axis=0) * seen).sum() / size)


def best_retained_mass(rows: np.ndarray, kept: int) -> float:
    """The most attention that any way to evict can retain; dynamic programming over sets."""
    mean = rows.mean(axis=0)
    states: dict[frozenset[int], float] = {frozenset(): 0.0}
    for step in range(len(mean)):
        later: dict[frozenset[int], float] = {}
        for held, mass in states.items():
            seen = held | {step}
            gained = mass + mean[step, list(seen)].sum()
            for result in [seen - {token} for token in seen] if len(seen) > kept else [seen]:
                later[result] = max(gained, later.get(result, 0.0))
        states = later
    return float(max(states.values()) / len(mean))


SIZE, KEPT, EXCERPTS = 14, 4, 4
# What greedy reaches at least of the best for a submodular function of a set that grows.
FACTOR = 1 - 1 / math.e

_BUDGETS = {"heavy": TokenBudget(sink=0, heavy=KEPT, recent=0), "h2o": split_budget(KEPT)}
_TOLERANCE = 1e-9


def check_bound(
    rows: np.ndarray, held: np.ndarray, kept: int, objective: str, h: str
) -> tuple[np.ndarray, Row]:
    """Compare what is held, bool ``[n, n]``, with the best sets after every step that evicts.

    The ratios of its worth to the best's, float ``[n - k]``, and the columns of docs/theory.md.
    """
    steps = range(kept, rows.shape[-1])
    best = [best_value(rows, kept, step, objective, h) for step in steps]
    tops, sets = np.array([top for top, _ in best]), np.stack([own for _, own in best])
    # What each step holds and what the step before held, as the step sees them.
    pairs = [set_values(rows, held[step - 1 : step + 1], step, objective, h) for step in steps]
    before, values = np.array(pairs).T
    ratios = values / tops
    known = np.tri(len(held), k=-1, dtype=bool)[kept:]  # tokens before the step's own
    lost = (sets & known & ~held[kept - 1 : -1]).sum(axis=1) / kept
    return ratios, {
        "lowest_ratio": ratios.min(), "mean_ratio": ratios.mean(), "last_ratio": ratios[-1],
        "holds": int(ratios.min() >= FACTOR - _TOLERANCE),
        "alpha": max(0.0, float(1 - ratios.min() / FACTOR)),
        "beta": max(0.0, float((FACTOR * tops - values).max() / tops[-1])),
        # The most that the worth of what was held falls, and that the best set changes, in a step.
        "drift": max([0.0, *(1 - before[1:] / values[:-1])]),
        "moves": int((sets[1:] & ~sets[:-1]).sum(axis=1).max(initial=0)), "lost": lost.max(),
    }  # fmt: skip


def measure_theory(study: Study, tick: Tick = no_tick) -> Tables:
    """Test the theorem on real and on adversarial attention."""
    cases = real_cases(study.model, study.sample.input_ids, SIZE, EXCERPTS)
    cases += adversarial_cases(SIZE, KEPT)
    tables: Tables = {"theory": [], "theory_steps": [], "theory_mass": []}
    series: dict[tuple[str, ...], list[np.ndarray]] = {}
    for done, (names, logits) in enumerate(cases):
        rows = attention_rows(logits)
        held = {name: cache_sets(logits, name, budget) for name, budget in _BUDGETS.items()}
        held["belady"] = belady_sets(rows, KEPT)
        masses = {name: retained_mass(rows, sets) for name, sets in held.items()}
        best = best_retained_mass(rows, KEPT)
        tables["theory_mass"].append({**names, **masses, "best": best})
        for objective, h in product(OBJECTIVES, CONCAVE):
            informed = informed_sets(rows, KEPT, objective, h)
            for policy, sets in {**held, "informed": informed}.items():
                ratios, bound = check_bound(rows, sets, KEPT, objective, h)
                kind = {"policy": policy, "objective": objective, "h": h}
                tables["theory"].append({**names, **kind, **bound})
                series.setdefault((names["case"], policy, objective, h), []).append(ratios)
        tick((done + 1) / len(cases))
    for (case, policy, objective, h), found in series.items():
        told = {"case": [case], "policy": [policy], "objective": [objective], "h": [h]}
        axes = {**told, "step": range(KEPT + 1, SIZE + 1)}
        tables["theory_steps"] += tabulate(axes, mean=np.mean(found, 0), lowest=np.min(found, 0))
    return tables


POLICIES = ("heavy", "h2o", "global")
_STEPS = 8


def worth_of_kept(
    layer: LayerAttention, gone_at: np.ndarray, kept: int, steps: list[int]
) -> np.ndarray:
    """Compare what a policy holds, ``gone_at`` int ``[H, T]``, with the highest scores.

    The steps, the newest tokens at which to compare, ascend: float ``[steps, H]``.
    """
    gone = torch.from_numpy(gone_at)
    total = torch.zeros(gone.shape, dtype=torch.float64)
    ratios = []
    for first, probabilities in layer.rows():
        received = probabilities.sum(dim=1).double().cpu()
        last = received.shape[-1]
        for step in steps:
            if first <= step < last:
                rows = received[:, : step - first + 1].sum(dim=1)
                scores = (total[:, :last] + rows)[:, : step + 1]
                best = scores.topk(kept, dim=-1).values.sum(dim=-1)
                ratios.append((scores * (gone[:, : step + 1] > step + 1)).sum(dim=-1) / best)
        total[:, :last] += received.sum(dim=1)
    return torch.stack(ratios).numpy()


def measure_long(study: Study, tick: Tick = no_tick) -> Tables:
    """Compare greedy eviction with the best sets on the whole text, at a 20 % budget."""
    kept = study.tokens(DEFAULT_BUDGET)
    steps = np.linspace(kept, study.length - 1, _STEPS).round().astype(int).tolist()
    rows: list[Row] = []
    for policy in POLICIES:
        gone = study.gone_at(policy, DEFAULT_BUDGET, tick if policy == "heavy" else no_tick)
        by_layer = dict(zip(study.layers, gone, strict=True))

        def look(own: LayerAttention, held: dict[int, np.ndarray] = by_layer) -> np.ndarray:
            return worth_of_kept(own, held[own.layer_idx], kept, steps)

        axes = {"policy": [policy], "layer": study.layers, "head": range(gone.shape[1])}
        ratios = study.of_layers(look).swapaxes(1, 2)
        rows += tabulate({**axes, "step": steps}, ratio=ratios)
    return {"theory_long": rows}
