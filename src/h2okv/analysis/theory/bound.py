"""Where greedy eviction keeps the promise of the theorem, and what it would need elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from h2okv.analysis.rows import Tick, no_tick
from h2okv.analysis.sample import Sample
from h2okv.analysis.tables import Row
from h2okv.analysis.theory.cases import Case, adversarial_cases, real_cases
from h2okv.analysis.theory.objectives import CONCAVE, OBJECTIVES, set_values
from h2okv.analysis.theory.policies import (
    attention_rows,
    belady_sets,
    best_retained_mass,
    best_value,
    cache_sets,
    informed_sets,
    retained_mass,
)
from h2okv.budget import TokenBudget

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
    """Compares what is held with the best of all sets, after every step that evicts.

    Args:
        rows: attention ``[G, n, n]``.
        held: bool ``[n, n]``, what is held after each token.
        kept: tokens in a set.
        objective: one of `OBJECTIVES`.
        h: one of `CONCAVE`.

    Returns:
        The comparison (arXiv 2306.14048, Theorem 4.4, for f without its slack).
    """
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
    """Tests the theorem on real and on adversarial attention.

    Args:
        model: a loaded model.
        sample: the text.
        tick: told the share that is done.

    Returns:
        The tables ``theory`` (each case), ``theory_steps`` (over cases, by step) and
        ``theory_mass`` (attention retained, with Belady and the best possible).
    """
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
