"""Figures and sentences of the report's sections, for sections.toml.

`draw_NAME` draws into the section's panels. `find_NAME` returns the values of its sentence;
``each`` is a list with the values of each repetition. For a finding of the paper ``agrees`` and
``partly`` say whether this model shows it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from h2okv.console import optional
from h2okv_lab import tables
from h2okv_lab.analysis.study import DEFAULT_BUDGET
from h2okv_lab.tables import BLUE, GREEN, ORANGE, PINK, RED, Row

Rows = Sequence[Row]
Tables = Mapping[str, Rows]
Values = dict[str, Any]

_STYLE_SHEET = Path(__file__).parent / "report.mplstyle"
GREY = "#7F7F7F"
STYLES: dict[str, dict[str, Any]] = {
    "h2o": {"color": BLUE, "marker": "o"},
    "global": {"color": PINK, "marker": "s"},
    "recent": {"color": ORANGE, "marker": "^"},
    "sink_recent": {"color": GREEN, "marker": "v"},
    "random": {"color": GREY, "marker": "x"},
}


def new_figure(
    size: Sequence[float] = (8, 3.6), panels: Sequence[Mapping[str, Any]] = ({},)
) -> tuple[Any, list[Any]]:
    """Create an empty figure with panels side by side, each with its properties."""
    with optional("matplotlib", "a picture", "analysis").rc_context(fname=_STYLE_SHEET):
        figure = tables.new_figure(size[0], size[1])
        axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    for panel, properties in zip(axes, panels, strict=True):
        panel.set(**properties)
    return figure, axes


def put_legend(figure: Any, panels: Iterable[Any]) -> None:
    """Add one legend for all panels below them, where it covers no point."""
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        # About 13 letters to the inch, and the handles.
        columns = int(13 * figure.get_figwidth() / (max(map(len, handles)) + 6))
        placement = {"loc": "outside lower center", "ncols": max(1, min(len(handles), columns))}
        figure.legend(handles.values(), handles, fontsize=9, **placement)


def distinct(rows: Rows, key: str) -> list[Any]:
    """Return a column's distinct values in order of first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def where(rows: Rows, **values: Any) -> Rows:
    """Return the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def column(rows: Rows, key: str) -> np.ndarray:
    """Return a column as float64."""
    return np.array([row[key] for row in rows], dtype=np.float64)


def mean_by(rows: Rows, key: str, value: str) -> tuple[list[Any], np.ndarray]:
    """Return the distinct values of one column, and the mean of another for each."""
    keys = distinct(rows, key)
    return keys, np.array([column(where(rows, **{key: group}), value).mean() for group in keys])


def percent(fraction: float) -> str:
    """Write a fraction with three digits."""
    return f"{100 * fraction:.3g} %"


def _mean(rows: Rows, key: str, **values: Any) -> float:
    return float(column(where(rows, **values), key).mean())


def _range(values: Any) -> dict[str, str]:
    return {"low": percent(min(values)), "high": percent(max(values))}


def draw_lines(axes: Any, rows: Rows, x: str, y: str, factor: float = 1.0) -> None:
    """Draw a line per policy: means of the rows with equal x."""
    for policy in distinct(rows, "policy"):
        xs, means = mean_by(where(rows, policy=policy), x, y)
        axes.plot(xs, factor * means, label=policy, **STYLES[policy])


def draw_layers(figure: Any, axes: Any, layers: list[int]) -> dict[int, dict[str, Any]]:
    """Return each layer's line style, dark to light with depth; add a bar for many layers."""
    from matplotlib import cm, colormaps, colors

    viridis = colormaps["viridis"]
    # Stop at 0.88 of the map: yellow is hard to see on white.
    shades = np.linspace(0.0, 0.88, max(2, len(layers)))
    looks = {n: {"color": viridis(shade)} for n, shade in zip(layers, shades, strict=False)}
    if len(layers) <= 8:
        return {layer: {**look, "label": f"layer {layer}"} for layer, look in looks.items()}
    span = colors.Normalize(layers[0], layers[0] + (layers[-1] - layers[0]) / 0.88)
    bar = figure.colorbar(cm.ScalarMappable(span, "viridis"), ax=axes, label="layer")
    bar.ax.set_ylim(layers[0], layers[-1])
    return looks


def mark_layers(axes: Any, rows: Rows) -> None:
    """Label the horizontal axis with layers, only as many as fit."""
    layers = sorted({int(row["layer"]) for row in rows})
    axes.set_xticks(layers if len(layers) <= 12 else layers[:: -(-len(layers) // 12)])
    axes.set_xlabel("layer")


def draw_heads(axes: Any, rows: Rows, shown: Mapping[str, str], line: float, label: str) -> None:
    """Draw columns in percent by layer, a mark per head, and a line for comparison."""
    looks = ((-0.12, BLUE, "o"), (0.12, ORANGE, "^"))
    for (key, text), (shift, colour, marker) in zip(shown.items(), looks, strict=True):
        xs, values = column(rows, "layer") + shift, 100 * column(rows, key)
        axes.plot(xs, values, marker, color=colour, alpha=0.75, label=text)
    axes.axhline(line, color=GREY, ls="--", lw=1, label=label)
    mark_layers(axes, rows)


def draw_sparsity(figure: Any, panels: list[Any], tables: Tables) -> None:
    shown = {
        "share": "keys that a query may see",
        "share_square": "whole square, including hidden keys",
    }
    draw_heads(panels[0], tables["sparsity"], shown, 95, "95 %, which the paper reports")


def find_sparsity(tables: Tables) -> Values:
    layers, means = mean_by(tables["sparsity"], "layer", "share")
    sparse = int((means > 0.95).sum())
    values = {"mean": percent(means.mean()), "sparse": sparse, "layers": len(layers)}
    values |= _range(column(tables["sparsity"], "share"))
    partly = (means > 0.9).mean() >= 0.75
    return {**values, "agrees": sparse >= 0.75 * len(layers), "partly": partly}


def draw_sinks(figure: Any, panels: list[Any], tables: Tables) -> None:
    shown = {"first_1": "first token", "first_4": "first 4 tokens"}
    even = 100 * tables["sinks"][0]["even_first_1"]
    draw_heads(panels[0], tables["sinks"], shown, even, "one token, if attention were even")


def find_sinks(tables: Tables) -> Values:
    first, even = column(tables["sinks"], "first_1"), tables["sinks"][0]["even_first_1"]
    values = {"mean": percent(first.mean()), "even": percent(even), **_range(first)}
    return {**values, "agrees": first.mean() >= 0.1, "partly": first.max() >= 0.1}


def draw_ranks(figure: Any, panels: list[Any], tables: Tables) -> None:
    """Draw rank plots by layer with the fitted tails."""
    looks = draw_layers(figure, panels[0], distinct(tables["score_ranks"], "layer"))
    for axes, kind in zip(panels, ("tokens", "words"), strict=True):
        rows = where(tables["score_ranks"], of=kind)
        for layer, look in looks.items():
            ranks, scores = (column(where(rows, layer=layer), key) for key in ("rank", "score"))
            axes.loglog(ranks, scores, "-", lw=1.6, **look)
        for law in where(tables["power_law"], of=kind):
            ends = np.array([1.0, law["tail"]])
            line = law["start"] * (ends / law["tail"]) ** (-1 / (law["exponent"] - 1))
            axes.loglog(ends, line, ":", color="black", lw=1, label="power law")
        scores = column(rows, "score")
        axes.set_ylim(max(scores.min(), scores.max() / 1e5) * 0.7, scores.max() * 1.6)


def find_ranks(tables: Tables) -> Values:
    entries, fits = [], []
    for kind in distinct(tables["power_law"], "of"):
        laws = where(tables["power_law"], of=kind)
        plausible, exponents = column(laws, "p_value") >= 0.1, column(laws, "exponent")
        ratio, significant = column(laws, "log_ratio"), column(laws, "log_ratio_p") < 0.05
        entry = {"kind": kind[:-1], "plausible": plausible.sum(), "layers": len(laws)}
        entry |= {"low": exponents.min(), "high": exponents.max()}
        entry["normal"] = ((ratio < 0) & significant).sum()
        entry["law"] = ((ratio > 0) & significant).sum()
        entries.append(entry)
        fits.append(plausible.mean())
    return {"each": entries, "agrees": min(fits) >= 0.75, "partly": max(fits) >= 0.5}


def draw_words(figure: Any, panels: list[Any], tables: Tables) -> None:
    rows = tables["word_scores"]
    kinds = (("score", "sum"), ("score_each", "each"))
    for axes, (key, measure) in zip(panels, kinds, strict=True):
        together, scores = column(rows, "together"), column(rows, key)
        axes.loglog(together, scores, ".", color=BLUE, alpha=0.4, ms=5)
        group = where(tables["cooccurrence"], layer="all", against="together")
        (correlation,) = where(group, measure=measure)
        interval = f"{correlation['low']:.2f} to {correlation['high']:.2f}"
        axes.set_title(f"Spearman {correlation['rho']:.2f} (95 %: {interval})")


def find_words(tables: Tables) -> Values:
    rows = where(tables["cooccurrence"], layer="all", against="together")
    (total,), (single,) = (where(rows, measure=name) for name in ("sum", "each"))
    rhos = (total["rho"], single["rho"])
    agrees, partly = min(rhos) >= 0.5, max(rhos) >= 0.5
    return {"total": total, "single": single, "agrees": agrees, "partly": partly}


def draw_ablation(figure: Any, panels: list[Any], tables: Tables) -> None:
    """Draw perplexity ratios with some tokens hidden; bars are 95 % intervals."""
    axes, rows = panels[0], tables["ablation"]
    shares = distinct(rows, "share")
    conditions = ("heavy hidden", "random hidden", "only heavy kept", "only random kept")
    looks = zip(conditions, (RED, GREY, BLUE, ORANGE), "oxs^", strict=True)
    for index, (condition, colour, marker) in enumerate(looks):
        condition_rows = where(rows, condition=condition)
        x = np.array([shares.index(row["share"]) for row in condition_rows]) + 0.14 * (index - 1.5)
        ratio, low, high = (column(condition_rows, key) for key in ("ratio", "low", "high"))
        spread, look = [ratio - low, high - ratio], {"fmt": marker, "color": colour}
        axes.errorbar(x, ratio, yerr=spread, label=condition, capsize=2, **look)
    axes.axhline(1, color="black", lw=0.8)
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000) if bottom < tick < top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(len(shares)), [f"{100 * share:g} % of the tokens" for share in shares])
    axes.grid(axis="x", visible=False)


def find_ablation(tables: Tables) -> Values:
    rows = where(tables["ablation"], condition="heavy hidden")
    others = where(tables["ablation"], condition="random hidden")
    shares = distinct(rows, "share")
    pairs = [[_mean(group, "ratio", share=share) for group in (rows, others)] for share in shares]
    entries = [
        {"share": percent(share), "heavy": heavy, "random": random}
        for share, (heavy, random) in zip(shares, pairs, strict=True)
    ]
    far = all(heavy - 1 > 2 * max(0.0, random - 1) for heavy, random in pairs)
    partly = all(heavy > random for heavy, random in pairs)
    return {"each": entries, "agrees": far, "partly": partly}


def draw_policies(figure: Any, panels: list[Any], tables: Tables) -> None:
    left, right = panels
    draw_lines(left, tables["perplexity"], "share", "ratio")
    draw_lines(right, tables["retention"], "share", "mass", 100)
    shares = distinct(tables["perplexity"], "share")
    for axes in panels:
        axes.set_xticks(shares, [f"{100 * share:g}" for share in shares])
        axes.minorticks_off()
    left.axhline(1, color="black", lw=0.8)


def find_policies(tables: Tables) -> Values:
    rows = where(tables["perplexity"], share=DEFAULT_BUDGET)
    (row,) = where(rows, policy="h2o")
    return {"each": rows, "agrees": row["low"] <= 1, "partly": row["ratio"] <= 1.05}


def draw_local_global(figure: Any, panels: list[Any], tables: Tables) -> None:
    rows = tables["local_global"]
    looks = zip(distinct(rows, "share"), (RED, ORANGE, BLUE, GREEN), "osv^", strict=False)
    for share, colour, marker in looks:
        share_rows, label = where(rows, share=share), f"{100 * share:g} % budget"
        for axes, key in zip(panels, ("layer", "step"), strict=True):
            xs, means = mean_by(share_rows, key, "overlap")
            axes.plot(xs, 100 * means, color=colour, marker=marker, label=label)
            axes.plot(xs, 100 * mean_by(share_rows, key, "chance")[1], ":", color=colour)
    mark_layers(panels[0], rows)


def find_local_global(tables: Tables) -> Values:
    rows = where(tables["local_global"], share=DEFAULT_BUDGET)
    overlap, chance = _mean(rows, "overlap"), _mean(rows, "chance")
    values = {"overlap": percent(overlap), "chance": percent(chance)}
    return {**values, "agrees": overlap >= 0.75, "partly": overlap > chance + 0.1}


def draw_stays(figure: Any, panels: list[Any], tables: Tables) -> None:
    draw_lines(panels[0], tables["stays"], "layer", "gone_at_once", 100)
    draw_lines(panels[1], tables["stays"], "layer", "p90")
    panels[0].set_ylim(bottom=0)
    for axes in panels:
        mark_layers(axes, tables["stays"])


def find_stays(tables: Tables) -> Values:
    names, rows = ("gone_at_once", "held_at_end"), tables["stays"]
    entries = [
        {"policy": policy, **{name: percent(_mean(rows, name, policy=policy)) for name in names}}
        for policy in ("h2o", "global")
    ]
    return {"each": entries}


def draw_agreement(figure: Any, panels: list[Any], tables: Tables) -> None:
    axes, rows = panels[0], tables["agreement"]
    heads = list(dict.fromkeys((row["layer"], row["head"]) for row in rows))
    square = column(rows, "jaccard").reshape(len(heads), len(heads))
    # The diagonal is 1 by definition and would flatten the rest.
    np.fill_diagonal(square, np.nan)
    image = axes.imshow(square, cmap="viridis", vmin=0)
    chance = rows[0]["chance"]
    bar = figure.colorbar(image, ax=axes, label="Jaccard similarity")
    bar.ax.axhline(chance, color="white", lw=2)
    ticks = list(range(0, len(heads), max(1, len(heads) // 16)))
    labels = [f"{heads[i][0]}.{heads[i][1]}" for i in ticks]
    axes.set_xticks(ticks, labels, rotation=90, fontsize=8)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.grid(visible=False)
    axes.set_title(f"Heavy hitters that two heads share\n(chance: {chance:.2f}, white line)")


def find_agreement(tables: Tables) -> Values:
    rows = [{**row, "same": row["layer"] == row["other_layer"]} for row in tables["agreement"]]
    others = [row for row in rows if not row["same"] or row["head"] != row["other_head"]]
    words = {True: "two heads of a layer", False: "heads of different layers"}
    kinds = zip(*mean_by(others, "same", "jaccard"), strict=True)
    entries = [{"words": words[same], "mean": mean} for same, mean in sorted(kinds, reverse=True)]
    return {"each": entries, "chance": rows[0]["chance"]}


def draw_neurons(figure: Any, panels: list[Any], tables: Tables) -> None:
    axes, rows = panels[0], tables["neurons"]
    for layer, look in draw_layers(figure, axes, distinct(rows, "layer")).items():
        ranks, rates = (column(where(rows, layer=layer), key) for key in ("rank", "frequency"))
        axes.loglog(ranks, 100 * rates.clip(1e-5), **look)
    axes.set_ylim(bottom=0.02)


def find_neurons(tables: Tables) -> Values:
    return _range(mean_by(tables["neurons"], "layer", "share_of_top_tenth")[1])
