"""What the tables of a report hold, in words; with a verdict where the paper found something."""

from __future__ import annotations

from typing import Any

import numpy as np

from h2okv.analysis.figures import Rows, Tables, column, distinct, mean_by, where
from h2okv.analysis.study import DEFAULT_BUDGET
from h2okv.analysis.theory import FACTOR

Told = tuple[str, str]
"""A sentence, and the verdict on the paper's finding if there is one."""


def percent(fraction: float) -> str:
    """Writes a fraction with three digits."""
    return f"{100 * fraction:.3g} %"


def _verdict(agrees: Any, partly: Any) -> str:
    return "agrees" if agrees else "in part" if partly else "differs"


def _mean(rows: Rows, key: str, **values: Any) -> float:
    return float(column(where(rows, **values), key).mean())


def tell_sparsity(tables: Tables) -> Told:
    rows = tables["sparsity"]
    layers, means = mean_by(rows, "layer", "share")
    heads, sparse = column(rows, "share"), int((means > 0.95).sum())
    told = (
        f"{percent(means.mean())} of them are below 1 % of their row's maximum (heads from"
        f" {percent(heads.min())} to {percent(heads.max())}); above 95 % in {sparse} of"
        f" {len(layers)} layers"
    )
    return told, _verdict(sparse >= 0.75 * len(layers), (means > 0.9).mean() >= 0.75)


def tell_ranks(tables: Tables) -> Told:
    told, fits = [], []
    for kind in distinct(tables["power_law"], "of"):
        laws = where(tables["power_law"], of=kind)
        plausible, exponents = column(laws, "p_value") >= 0.1, column(laws, "exponent")
        ratio, sure = column(laws, "log_ratio"), column(laws, "log_ratio_p") < 0.05
        told.append(
            f"plausible by {kind[:-1]} (p at least 0.1) in {plausible.sum()} of {len(laws)} layers,"
            f" with exponents {exponents.min():.1f} to {exponents.max():.1f}; a log-normal tail"
            f" fits better (p < 0.05) in {((ratio < 0) & sure).sum()}, the power law in"
            f" {((ratio > 0) & sure).sum()}"
        )
        fits.append(plausible.mean())
    return "; ".join(told), _verdict(min(fits) >= 0.75, max(fits) >= 0.5)


def tell_words(tables: Tables) -> Told:
    rows = where(tables["cooccurrence"], layer="all", against="together")
    (total,), (each,) = (where(rows, measure=name) for name in ("sum", "each"))
    told = (
        f"rank correlation {total['rho']:.2f} ({total['low']:.2f} to {total['high']:.2f}) of a"
        f" word's sum, {each['rho']:.2f} ({each['low']:.2f} to {each['high']:.2f}) of a single"
        " token, fair to its place in the text"
    )
    rhos = (total["rho"], each["rho"])
    return told, _verdict(min(rhos) >= 0.5, max(rhos) >= 0.5)


def tell_sinks(tables: Tables) -> Told:
    first, even = column(tables["sinks"], "first_1"), tables["sinks"][0]["even_first_1"]
    told = (
        f"the first token gets {percent(first.mean())} (heads from {percent(first.min())} to"
        f" {percent(first.max())}; evenly {percent(even)})"
    )
    return told, _verdict(first.mean() >= 0.1, first.max() >= 0.1)


def tell_ablation(tables: Tables) -> Told:
    rows = tables["ablation"]
    told, pairs = [], []
    for share in distinct(rows, "share"):
        heavy = _mean(rows, "ratio", condition="heavy hidden", share=share)
        random = _mean(rows, "ratio", condition="random hidden", share=share)
        pairs.append((heavy, random))
        told.append(
            f"with {percent(share)} of the tokens hidden perplexity is {heavy:.2f} times the full"
            f" one, with random ones {random:.2f} times"
        )
    far = all(heavy - 1 > 2 * max(0.0, random - 1) for heavy, random in pairs)
    return "; ".join(told), _verdict(far, all(heavy > random for heavy, random in pairs))


def tell_policies(tables: Tables) -> Told:
    rows = where(tables["perplexity"], share=DEFAULT_BUDGET)
    told = ", ".join(
        f"{row['policy']} {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        for row in rows
    )
    (own,) = where(rows, policy="h2o")
    here = f"at 20 % of the text, perplexity times the full cache's: {told}"
    return here, _verdict(own["low"] <= 1, own["ratio"] <= 1.05)


def tell_local_global(tables: Tables) -> Told:
    rows = where(tables["local_global"], share=DEFAULT_BUDGET)
    overlap, chance = _mean(rows, "overlap"), _mean(rows, "chance")
    told = f"{percent(overlap)} of the heavy hitters are the same (by chance {percent(chance)})"
    return told, _verdict(overlap >= 0.75, overlap > chance + 0.1)


def tell_stays(tables: Tables) -> Told:
    told = []
    for policy in ("h2o", "global"):
        rows = where(tables["stays"], policy=policy)
        told.append(
            f"under {policy} {percent(_mean(rows, 'gone_at_once'))} of the entries go when the"
            f" recent window has passed them, {percent(_mean(rows, 'held_at_end'))} are held at the"
            " end"
        )
    return "; ".join(told), ""


def tell_agreement(tables: Tables) -> Told:
    found: dict[str, list[float]] = {}
    for row in tables["agreement"]:
        is_same = row["layer"] == row["other_layer"]
        if not is_same or row["head"] != row["other_head"]:
            words = "two heads of a layer" if is_same else "heads of different layers"
            found.setdefault(words, []).append(row["jaccard"])
    told = "; ".join(f"{words}: {np.mean(own):.2f}" for words, own in sorted(found.items())[::-1])
    return f"{told}; by chance {tables['agreement'][0]['chance']:.2f}", ""


def tell_theory(tables: Tables) -> Told:
    told = []
    for policy, case, name in (
        ("heavy", "real", "on real rows"), ("h2o", "real", "on real rows"),
        ("heavy", "late star", "on rows made to fail"),
    ):  # fmt: skip
        own = where(tables["theory"], case=case, policy=policy)
        held, lowest = int(column(own, "holds").sum()), column(own, "lowest_ratio").min()
        told.append(f"{policy} {name} {held} of {len(own)} (lowest {lowest:.2f})")
    return (
        f"comparisons in which the set held is worth at least 1 - 1/e = {FACTOR:.2f} of the best"
        f" one after every step, over all objectives: {', '.join(told)}"
    ), ""


def tell_theory_mass(tables: Tables) -> Told:
    rows = where(tables["theory_mass"], case="real")
    names = {"heavy": "heavy", "h2o": "h2o", "belady": "Belady", "best": "best possible"}
    told = [f"{label} {percent(_mean(rows, name))}" for name, label in names.items()]
    return f"on real rows: {', '.join(told)}", ""


def tell_theory_long(tables: Tables) -> Told:
    told = []
    for policy in ("heavy", "h2o", "global"):
        ratio = column(where(tables["theory_long"], policy=policy), "ratio")
        told.append(f"{policy} {ratio.mean():.2f} (lowest {ratio.min():.2f})")
    return (
        "accumulated score of what is held, as a share of the best set's, mean of heads and"
        f" steps: {', '.join(told)}; the bound asks for {FACTOR:.2f}"
    ), ""


def tell_neurons(tables: Tables) -> Told:
    _, tops = mean_by(tables["neurons"], "layer", "share_of_top_tenth")
    return (
        f"the most active tenth of a layer's neurons has {percent(min(tops))} to"
        f" {percent(max(tops))} of all activations"
    ), ""
