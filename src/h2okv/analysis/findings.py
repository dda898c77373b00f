"""The paper's findings beside this model's figures, with a verdict for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from h2okv.analysis.figures import Rows, column, distinct, where

Tables = dict[str, Rows]
AGREES, PARTLY, DIFFERS = "agrees", "in part", "differs"
BUDGET = 0.2


@dataclass(frozen=True)
class Finding:
    """What the paper (arXiv 2306.14048) found, and what the tables of a model say of it.

    Attributes:
        paper: the observation.
        tables: the CSV files that it takes, without ending.
        judge: tells this model's figures and the verdict.
        rule: when the verdict is "agrees", and when "in part".
    """

    paper: str
    tables: tuple[str, ...]
    judge: Callable[[Tables], tuple[str, str]]
    rule: str


def percent(fraction: float) -> str:
    """Writes a fraction with three digits."""
    return f"{100 * fraction:.3g} %"


def _verdict(agrees: Any, partly: Any) -> str:
    return AGREES if agrees else PARTLY if partly else DIFFERS


def _sparsity(tables: Tables) -> tuple[str, str]:
    rows = tables["sparsity"]
    layers = distinct(rows, "layer")
    means = np.array([column(where(rows, layer=layer), "share").mean() for layer in layers])
    sparse = int((means > 0.95).sum())
    here = f"{percent(means.mean())} of them; above 95 % in {sparse} of {len(layers)} layers"
    return here, _verdict(sparse >= 0.75 * len(layers), (means > 0.9).mean() >= 0.75)


def _power_law(tables: Tables) -> tuple[str, str]:
    laws = tables["power_law"]
    told, fits = [], []
    for kind in distinct(laws, "of"):
        plausible = column(where(laws, of=kind), "p_value") >= 0.1
        told.append(f"plausible by {kind[:-1]} in {plausible.sum()} of {len(plausible)} layers")
        fits.append(plausible.mean())
    return "; ".join(told), _verdict(min(fits) >= 0.75, max(fits) >= 0.5)


def _words(tables: Tables) -> tuple[str, str]:
    rows = where(tables["cooccurrence"], layer="all", against="together")
    total, each = (where(rows, measure=name)[0]["rho"] for name in ("sum", "each"))
    here = f"rank correlation {total:.2f} of a word's sum, {each:.2f} of a single token"
    return here, _verdict(min(total, each) >= 0.5, max(total, each) >= 0.5)


def _ablation(tables: Tables) -> tuple[str, str]:
    rows = tables["ablation"]
    pairs = [
        [column(where(rows, condition=name, share=share), "ratio").mean() for name in _HIDDEN]
        for share in distinct(rows, "share")
    ]
    heavy, random = pairs[0]
    here = (
        f"with {percent(rows[0]['share'])} of the tokens hidden perplexity is {heavy:.2f} times the"
        f" full one, with random ones {random:.2f} times"
    )
    far = all(one - 1 > 2 * max(0.0, other - 1) for one, other in pairs)
    return here, _verdict(far, all(one > other for one, other in pairs))


_HIDDEN = ("heavy hidden", "random hidden")


def _predicted(tables: Tables) -> tuple[str, str]:
    rows = where(tables["local_global"], share=BUDGET)
    overlap, chance = column(rows, "overlap").mean(), column(rows, "chance").mean()
    here = f"{percent(overlap)} of the heavy hitters are the same (by chance {percent(chance)})"
    return here, _verdict(overlap >= 0.75, overlap > chance + 0.1)


def _policies(tables: Tables) -> tuple[str, str]:
    rows = where(tables["perplexity"], share=BUDGET)
    (own,), (recent,) = where(rows, policy="h2o"), where(rows, policy="recent")
    here = (
        f"perplexity {own['ratio']:.3f} times the full cache's ({own['low']:.3f} to"
        f" {own['high']:.3f}); a recent window's {recent['ratio']:.3f} times"
    )
    return here, _verdict(own["low"] <= 1, own["ratio"] <= 1.05)


def _sinks(tables: Tables) -> tuple[str, str]:
    rows = tables["sinks"]
    first, even = column(rows, "first_1"), rows[0]["even_first_1"]
    here = f"the first token gets {percent(first.mean())} (evenly {percent(even)})"
    return here, _verdict(first.mean() >= 0.1, first.max() >= 0.1)


FINDINGS = (
    Finding(
        "More than 95 % of attention entries are small, in almost all layers", ("sparsity",),
        _sparsity, "in three quarters of the layers; in part: more than 90 % in as many",
    ),
    Finding(
        "Accumulated scores follow a power law", ("power_law",), _power_law,
        "p at least 0.1 in three quarters of the layers, by token and by word; in part: in half of"
        " them by one of the two",
    ),
    Finding(
        "Words that often occur together with others have the high scores", ("cooccurrence",),
        _words, "rank correlation of 0.5 or more for both; in part: for one",
    ),
    Finding(
        "Hiding the heavy hitters hurts far more than hiding random tokens", ("ablation",),
        _ablation, "hiding them costs more than twice as much, at every share; in part: more",
    ),
    Finding(
        "Attention so far predicts the heavy hitters of the whole text", ("local_global",),
        _predicted, "75 % are the same at a budget of 20 %; in part: 10 points above chance",
    ),
    Finding(
        "20 % of the cache is as good as all of it", ("perplexity",), _policies,
        "the 95 % interval includes 1; in part: at most 5 % higher",
    ),
    Finding(
        "The first tokens are attention sinks (arXiv 2309.17453)", ("sinks",), _sinks,
        "10 % of all attention on the first token; in part: in some head",
    ),
)  # fmt: skip
