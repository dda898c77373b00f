"""What the tables of a report hold, for the sentences and the verdicts of sections.toml.

Each function gives what its section's sentence is filled with; ``each`` is a list, of which every
entry fills the part that is repeated. Where the paper found something, ``agrees`` and ``partly``
say whether this model does.
"""

from __future__ import annotations

from typing import Any

from h2okv.analysis.figures import Rows, Tables, column, distinct, mean_by, where
from h2okv.analysis.study import DEFAULT_BUDGET

Found = dict[str, Any]


def percent(fraction: float) -> str:
    """Writes a fraction with three digits."""
    return f"{100 * fraction:.3g} %"


def _mean(rows: Rows, key: str, **values: Any) -> float:
    return float(column(where(rows, **values), key).mean())


def _range(values: Any) -> dict[str, str]:
    return {"low": percent(min(values)), "high": percent(max(values))}


def find_sparsity(tables: Tables) -> Found:
    layers, means = mean_by(tables["sparsity"], "layer", "share")
    sparse = int((means > 0.95).sum())
    told = {"mean": percent(means.mean()), "sparse": sparse, "layers": len(layers)}
    told |= _range(column(tables["sparsity"], "share"))
    partly = (means > 0.9).mean() >= 0.75
    return {**told, "agrees": sparse >= 0.75 * len(layers), "partly": partly}


def find_ranks(tables: Tables) -> Found:
    told, fits = [], []
    for kind in distinct(tables["power_law"], "of"):
        laws = where(tables["power_law"], of=kind)
        plausible, exponents = column(laws, "p_value") >= 0.1, column(laws, "exponent")
        ratio, sure = column(laws, "log_ratio"), column(laws, "log_ratio_p") < 0.05
        own = {"kind": kind[:-1], "plausible": plausible.sum(), "layers": len(laws)}
        own |= {"low": exponents.min(), "high": exponents.max()}
        told.append(
            {**own, "normal": ((ratio < 0) & sure).sum(), "law": ((ratio > 0) & sure).sum()}
        )
        fits.append(plausible.mean())
    return {"each": told, "agrees": min(fits) >= 0.75, "partly": max(fits) >= 0.5}


def find_words(tables: Tables) -> Found:
    rows = where(tables["cooccurrence"], layer="all", against="together")
    (total,), (single,) = (where(rows, measure=name) for name in ("sum", "each"))
    rhos = (total["rho"], single["rho"])
    agrees, partly = min(rhos) >= 0.5, max(rhos) >= 0.5
    return {"total": total, "single": single, "agrees": agrees, "partly": partly}


def find_sinks(tables: Tables) -> Found:
    first, even = column(tables["sinks"], "first_1"), tables["sinks"][0]["even_first_1"]
    told = {"mean": percent(first.mean()), "even": percent(even), **_range(first)}
    return {**told, "agrees": first.mean() >= 0.1, "partly": first.max() >= 0.1}


def find_ablation(tables: Tables) -> Found:
    rows = where(tables["ablation"], condition="heavy hidden")
    others = where(tables["ablation"], condition="random hidden")
    shares = distinct(rows, "share")
    pairs = [[_mean(own, "ratio", share=share) for own in (rows, others)] for share in shares]
    told = [
        {"share": percent(share), "heavy": heavy, "random": random}
        for share, (heavy, random) in zip(shares, pairs, strict=True)
    ]
    far = all(heavy - 1 > 2 * max(0.0, random - 1) for heavy, random in pairs)
    partly = all(heavy > random for heavy, random in pairs)
    return {"each": told, "agrees": far, "partly": partly}


def find_policies(tables: Tables) -> Found:
    rows = where(tables["perplexity"], share=DEFAULT_BUDGET)
    (own,) = where(rows, policy="h2o")
    return {"each": rows, "agrees": own["low"] <= 1, "partly": own["ratio"] <= 1.05}


def find_local_global(tables: Tables) -> Found:
    rows = where(tables["local_global"], share=DEFAULT_BUDGET)
    overlap, chance = _mean(rows, "overlap"), _mean(rows, "chance")
    told = {"overlap": percent(overlap), "chance": percent(chance)}
    return {**told, "agrees": overlap >= 0.75, "partly": overlap > chance + 0.1}


def find_stays(tables: Tables) -> Found:
    names, rows = ("gone_at_once", "held_at_end"), tables["stays"]
    told = [
        {"policy": policy, **{name: percent(_mean(rows, name, policy=policy)) for name in names}}
        for policy in ("h2o", "global")
    ]
    return {"each": told}


def find_agreement(tables: Tables) -> Found:
    rows = [{**row, "same": row["layer"] == row["other_layer"]} for row in tables["agreement"]]
    others = [row for row in rows if not row["same"] or row["head"] != row["other_head"]]
    words = {True: "two heads of a layer", False: "heads of different layers"}
    kinds = zip(*mean_by(others, "same", "jaccard"), strict=True)
    told = [{"words": words[same], "mean": mean} for same, mean in sorted(kinds, reverse=True)]
    return {"each": told, "chance": rows[0]["chance"]}


def find_theory(tables: Tables) -> Found:
    names = {"real": "real rows", "late star": "rows made to fail"}
    told = []
    for policy, case in (("heavy", "real"), ("h2o", "real"), ("heavy", "late star")):
        own = where(tables["theory"], case=case, policy=policy)
        held, lowest = int(column(own, "holds").sum()), column(own, "lowest_ratio").min()
        figures = {"held": held, "count": len(own), "lowest": lowest}
        told.append({"policy": policy, "rows": names[case], **figures})
    return {"each": told}


def find_theory_mass(tables: Tables) -> Found:
    names = ("heavy", "h2o", "belady", "best")
    rows = where(tables["theory_mass"], case="real")
    return {name: percent(_mean(rows, name)) for name in names}


def find_theory_long(tables: Tables) -> Found:
    told = []
    for policy in ("heavy", "h2o", "global"):
        ratio = column(where(tables["theory_long"], policy=policy), "ratio")
        told.append({"policy": policy, "mean": ratio.mean(), "lowest": ratio.min()})
    return {"each": told}


def find_neurons(tables: Tables) -> Found:
    return _range(mean_by(tables["neurons"], "layer", "share_of_top_tenth")[1])
