"""The paper's theorem by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel

from h2okv.analysis.attention_stats import LayerAttention, Tick, no_tick, read_observed
from h2okv.analysis.study import DEFAULT_BUDGET, Sample, Study
from h2okv.cache import H2OCache
from h2okv.config import TokenBudget
from h2okv.integration.attention import h2o_attention
from h2okv.records import Row

_MOST_LAYERS = 8


@dataclass(frozen=True)
class Case:
    """One small matrix of attention.

    Attributes:
        name: ``real``, or what is adversarial about it.
        layer: the layer, -1 for a made-up case.
        head: the KV head, -1 for a made-up case.
        excerpt: which excerpt of the text, -1 for a made-up case.
        logits: float64 ``[G, n, n]``.
    """

    name: str
    layer: int
    head: int
    excerpt: int
    logits: np.ndarray


def real_cases(
    model: PreTrainedModel, input_ids: torch.Tensor, size: int, excerpts: int
) -> list[Case]:
    """Reads short excerpts, so that each row of attention is there from its first token on."""
    found: list[Case] = []
    starts = np.linspace(0, input_ids.shape[1] - size, excerpts).astype(int)
    for number, start in enumerate(starts):

        def keep(layer: LayerAttention, number: int = number) -> None:
            heads = layer.key.shape[0]
            grouped = layer.query.double().unflatten(0, (heads, -1))
            logits = grouped @ layer.key.double().unsqueeze(1).transpose(-1, -2) * layer.scale
            if layer.softcap is not None:
                logits = layer.softcap * torch.tanh(logits / layer.softcap)
            for head, part in enumerate(logits.cpu().numpy()):
                found.append(Case("real", layer.layer_idx, head, number, part))

        read_observed(model, input_ids[:, start : start + size], keep)
    layers = sorted({case.layer for case in found})
    places = np.unique(np.linspace(0, len(layers) - 1, _MOST_LAYERS).round().astype(int))
    chosen = {layers[place] for place in places}
    return [case for case in found if case.layer in chosen]


def adversarial_cases(size: int, kept: int) -> list[Case]:
    """Makes attention on which eviction by what has been must fail, or is put to the test.

    - ``late star``: a token that nobody looks at on arrival, and everybody afterwards.
    - ``bait``: the first tokens draw all attention at first and none later, when every query looks
      at the two tokens before it.
    - ``twins``: the same few tokens share most of each row, the rest goes to one token that is
      another one each time: keeping all of the few covers no row better than keeping one.
    - ``even``: every token sees all tokens alike.
    """
    weights = {name: np.full((size, size), 1e-4) for name in ("late star", "bait", "twins")}
    for query in range(size):
        star, bait, twins = (weights[name][query] for name in ("late star", "bait", "twins"))
        star[: min(query + 1, kept)] = 0.05
        if query > kept:
            star[kept] = 1.0
        if query < size // 2:
            bait[: min(query + 1, kept)] = 1.0
        else:
            bait[max(0, query - 2) : query] = 1.0
        twins[: min(query + 1, kept)] = 0.5 / min(query + 1, kept)
        twins[max(kept, query - 1)] = 0.5
    weights["even"] = np.ones((size, size))
    return [Case(name, -1, -1, -1, np.log(rows)[None]) for name, rows in weights.items()]


CONCAVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda z: z,
    "sqrt": np.sqrt,
    "log": np.log1p,
}
"""Functions h: growing, concave, 0 at 0."""

OBJECTIVES = ("tokens", "total", "rows")
"""What h is applied to: each token's accumulated attention, their sum, or each row's kept mass."""


def set_values(
    rows: np.ndarray, members: np.ndarray, step: int, objective: str, h: str
) -> np.ndarray:
    """Computes the worth of sets after a step: float64 ``[S]``.

    With o[s] the attention that token s has received from the queries up to the step:
    ``tokens`` is the sum over s of h(o[s]) (additive); ``total`` is h(sum over s of o[s]);
    ``rows`` is the sum over queries of h(the query's attention on the set). The last one knows
    that a token is worth little where others have covered a query already.

    ``rows`` is full attention ``[G, n, n]``, 0 after the diagonal; ``members`` bool ``[S, n]``, one
    set in each row.
    """
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
    """Turns logits ``[G, n, n]`` into rows of causal attention, float64 ``[G, n, n]``."""
    size = logits.shape[-1]
    masked = np.where(np.tri(size, dtype=bool), logits, -np.inf)
    weights = np.exp(masked - masked.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def cache_sets(logits: np.ndarray, policy: str, budget: TokenBudget) -> np.ndarray:
    """Lets the library's own cache evict on given logits ``[G, n, n]``, one token at a time.

    Queries are the logits' rows and keys are unit vectors, so that the attention computes exactly
    these logits, and its softmax runs over what is held. Row i of the result, bool ``[n, n]``,
    marks what is held after token i.
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
    """Lists every set of tokens, bool ``[C(size, kept), width]``; shared, so do not change it."""
    chosen = np.array(list(combinations(range(size), kept)))
    members = np.zeros((len(chosen), width), dtype=bool)
    np.put_along_axis(members, chosen, True, axis=1)
    return members


def best_value(
    rows: np.ndarray, kept: int, step: int, objective: str, h: str
) -> tuple[float, np.ndarray]:
    """Finds the best of all sets of a size after a step: its worth, and the set as bool ``[n]``."""
    members = all_sets(step + 1, kept, rows.shape[-1])
    values = set_values(rows, members, step, objective, h)
    place = int(values.argmax())
    return float(values[place]), members[place]


def retained_mass(rows: np.ndarray, held: np.ndarray) -> float:
    """The mean fraction of full attention that falls on what a query can still see."""
    size = rows.shape[-1]
    seen = np.eye(size, dtype=bool)
    seen[1:] |= held[:-1]
    return float((rows.mean(axis=0) * seen).sum() / size)


def best_retained_mass(rows: np.ndarray, kept: int) -> float:
    """The most attention that any way of evicting can retain, over all of them.

    Dynamic programming over the kept sets: the answer for a set after a step is the best over the
    sets it can come from by taking in the newest token and dropping one.
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


SIZE, KEPT, EXCERPTS = 14, 4, 4
FACTOR = 1 - 1 / math.e
"""What greedy reaches at least of the best for a submodular function of a set that grows."""

_BUDGETS = {
    "heavy": TokenBudget(sink=0, heavy=KEPT, recent=0),
    "h2o": TokenBudget(sink=0, heavy=KEPT - KEPT // 2, recent=KEPT // 2),
}
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Bound:
    """How a policy does on a case, step by step.

    Attributes:
        ratios: float ``[n - k]``, worth of what is held to the best, after each step that evicts.
        alpha: the least alpha for which ``(1 - 1/e) (1 - alpha) best`` is reached with beta = 0.
        beta: the least beta with alpha = 0, as a share of the last step's best.
        drift: the most that the worth of what was held before falls from one step to the next.
        moves: the most tokens by which the best set changes from one step to the next; eviction
            changes one.
        lost: the largest share of a step's best set that had been evicted before it.
    """

    ratios: np.ndarray
    alpha: float
    beta: float
    drift: float
    moves: int
    lost: float


def check_bound(rows: np.ndarray, held: np.ndarray, kept: int, objective: str, h: str) -> Bound:
    """Compares what is held, bool ``[n, n]``, with the best sets after every step that evicts."""
    steps = range(kept, rows.shape[-1])
    values, tops, best_sets, drifts, lost = [], [], [], [0.0], []
    for step in steps:
        values.append(float(set_values(rows, held[step][None], step, objective, h)[0]))
        top, best_set = best_value(rows, kept, step, objective, h)
        tops.append(top)
        best_sets.append(best_set)
        gone = ~held[step - 1][:step]
        lost.append((best_set[:step] & gone).sum() / kept)
        if step > kept:
            before = held[step - 1][None]
            now = float(set_values(rows, before, step, objective, h)[0])
            drifts.append(1 - now / values[-2])
    moved = [int((b & ~a).sum()) for a, b in zip(best_sets, best_sets[1:], strict=False)]
    ratios = np.array(values) / np.array(tops)
    lacking = FACTOR * np.array(tops) - np.array(values)
    return Bound(
        ratios=ratios,
        alpha=max(0.0, float(1 - ratios.min() / FACTOR)),
        beta=max(0.0, float(lacking.max() / tops[-1])),
        drift=max(drifts),
        moves=max(moved, default=0),
        lost=float(max(lost)),
    )


def measure_theory(
    model: PreTrainedModel, sample: Sample, tick: Tick = no_tick
) -> dict[str, list[Row]]:
    """Tests the theorem on real and on adversarial attention."""
    cases = real_cases(model, sample.input_ids, SIZE, EXCERPTS) + adversarial_cases(SIZE, KEPT)
    rows: list[Row] = []
    masses: list[Row] = []
    series: dict[tuple[str, str, str, str], list[np.ndarray]] = {}
    for done, case in enumerate(cases):
        attention = attention_rows(case.logits)
        held = {name: cache_sets(case.logits, name, budget) for name, budget in _BUDGETS.items()}
        held["belady"] = belady_sets(attention, KEPT)
        masses.append(_mass_row(case, attention, held))
        for objective in OBJECTIVES:
            for h in CONCAVE:
                informed = informed_sets(attention, KEPT, objective, h)
                for policy, sets in {**held, "informed": informed}.items():
                    bound = check_bound(attention, sets, KEPT, objective, h)
                    rows.append(_row(case, policy, objective, h, bound))
                    key = (case.name, policy, objective, h)
                    series.setdefault(key, []).append(bound.ratios)
        tick((done + 1) / len(cases))
    steps: list[Row] = [
        {
            "case": name,
            "policy": policy,
            "objective": objective,
            "h": h,
            "step": KEPT + place + 1,
            "mean": column.mean(),
            "lowest": column.min(),
        }
        for (name, policy, objective, h), ratios in series.items()
        for place, column in enumerate(np.stack(ratios).T)
    ]
    return {"theory": rows, "theory_steps": steps, "theory_mass": masses}


def _names(case: Case) -> dict[str, object]:
    names: dict[str, object] = {"layer": case.layer, "head": case.head, "excerpt": case.excerpt}
    return {"case": case.name, **names}


def _row(case: Case, policy: str, objective: str, h: str, bound: Bound) -> Row:
    return {
        **_names(case),
        "policy": policy,
        "objective": objective,
        "h": h,
        "lowest_ratio": bound.ratios.min(),
        "mean_ratio": bound.ratios.mean(),
        "last_ratio": bound.ratios[-1],
        "holds": int(bound.ratios.min() >= FACTOR - _TOLERANCE),
        "alpha": bound.alpha,
        "beta": bound.beta,
        "drift": bound.drift,
        "moves": bound.moves,
        "lost": bound.lost,
    }


def _mass_row(case: Case, attention: np.ndarray, held: dict[str, np.ndarray]) -> Row:
    retained = {name: retained_mass(attention, sets) for name, sets in held.items()}
    return {**_names(case), **retained, "best": best_retained_mass(attention, KEPT)}


POLICIES = ("heavy", "h2o", "global")
_STEPS = 8


class Worth:
    """Compares what policies hold with the best set, by full attention's accumulated score.

    With h the identity a set's worth is the sum of its tokens' scores, so the best set is that of
    the highest ones, however long the text is.

    Args:
        gone_at: for each policy int ``[L, H, T]``, the first query that does not see a token.
        layers: the layers of these arrays, in order.
        kept: tokens in a set.
        steps: the newest tokens at which to compare, ascending.
    """

    def __init__(
        self,
        gone_at: dict[str, np.ndarray],
        layers: tuple[int, ...],
        kept: int,
        steps: list[int],
    ) -> None:
        self._gone = {name: torch.from_numpy(gone) for name, gone in gone_at.items()}
        self._layers, self._kept, self._steps = layers, kept, steps
        self.ratios: list[Row] = []

    def see_layer(self, layer: LayerAttention) -> None:
        """Takes one layer's attention; mutates `ratios`."""
        place = self._layers.index(layer.layer_idx)
        total = torch.zeros(layer.key.shape[0], layer.key.shape[1], dtype=torch.float64)
        for first, probabilities in layer.rows():
            received = probabilities.sum(dim=1).double().cpu()
            last = received.shape[-1]
            for step in self._steps:
                if first <= step < last:
                    rows = received[:, : step - first + 1].sum(dim=1)
                    self._compare(place, step, (total[:, :last] + rows)[:, : step + 1])
            total[:, :last] += received.sum(dim=1)

    def _compare(self, place: int, step: int, scores: torch.Tensor) -> None:
        best = scores.topk(self._kept, dim=-1).values.sum(dim=-1)
        for policy, gone in self._gone.items():
            held = gone[place, :, : step + 1] > step + 1
            ratio = (scores * held).sum(dim=-1) / best
            self.ratios += [
                {
                    "policy": policy,
                    "layer": self._layers[place],
                    "head": head,
                    "step": step,
                    "ratio": value,
                }
                for head, value in enumerate(ratio.tolist())
            ]


def measure_long(study: Study, tick: Tick = no_tick) -> dict[str, list[Row]]:
    """Compares greedy eviction with the best sets on the whole text, at a 20 % budget."""
    gone = {
        policy: study.gone_at(policy, DEFAULT_BUDGET, tick if policy == "heavy" else no_tick)
        for policy in POLICIES
    }
    kept = study.tokens(DEFAULT_BUDGET)
    steps = np.linspace(kept, study.length - 1, _STEPS).round().astype(int).tolist()
    worth = Worth(gone, study.layers, kept, steps)
    read_observed(study.model, study.sample.input_ids, worth.see_layer)
    return {"theory_long": worth.ratios}
