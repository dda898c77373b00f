"""The report's figures, each made from tables."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from h2okv import plots
from h2okv.analysis.theory import FACTOR
from h2okv.console import optional
from h2okv.plots import BLUE, GREEN, ORANGE, PINK, RED

Rows = list[dict[str, Any]]
Tables = dict[str, Rows]

GREY = "#7F7F7F"
STYLES: dict[str, dict[str, Any]] = {
    "h2o": {"color": BLUE, "marker": "o"},
    "global": {"color": PINK, "marker": "s"},
    "recent": {"color": ORANGE, "marker": "^"},
    "sink_recent": {"color": GREEN, "marker": "v"},
    "random": {"color": GREY, "marker": "x"},
    "heavy": {"color": RED, "marker": "D"},
    "belady": {"color": GREEN, "marker": "P"},
}
LABELS = {
    "heavy": "heavy (the paper's greedy)",
    "belady": "Belady (future)",
    "best": "best possible",
}
_RC = {
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def new_figure(columns: int = 1, width: float = 8.0, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Makes an empty figure with some panels side by side."""
    with optional("matplotlib", "a picture", "analysis").rc_context(_RC):
        figure = plots.new_figure(width, height)
        axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def distinct(rows: Rows, key: str) -> list[Any]:
    """Returns a column's different values in the order of their first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def where(rows: Rows, **values: Any) -> Rows:
    """Returns the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def column(rows: Rows, key: str) -> np.ndarray:
    """Returns a column as float64."""
    return np.array([row[key] for row in rows], dtype=np.float64)


def mean_by(rows: Rows, key: str, value: str) -> tuple[list[Any], list[float]]:
    """The different values of one column, and the mean of another one for each."""
    places = distinct(rows, key)
    return places, [column(where(rows, **{key: place}), value).mean() for place in places]


def draw_lines(axes: Any, rows: Rows, x: str, y: str, factor: float = 1.0) -> None:
    """Draws a line for each policy, means of the rows with the same place; mutates the axes."""
    for policy in distinct(rows, "policy"):
        places, means = mean_by(where(rows, policy=policy), x, y)
        label = LABELS.get(policy, policy)
        axes.plot(places, factor * np.array(means), label=label, **STYLES[policy])


def layer_colours(layers: list[int]) -> dict[int, Any]:
    """Gives each layer a colour, from dark to light with depth."""
    viridis = importlib.import_module("matplotlib").colormaps["viridis"]
    places = np.linspace(0.0, 0.88, max(2, len(layers)))
    return {layer: viridis(place) for layer, place in zip(layers, places, strict=False)}


def mark_layers(axes: Any, rows: Rows) -> None:
    """Labels the horizontal axis with layers, not more of them than fit."""
    layers = sorted({int(row["layer"]) for row in rows})
    axes.set_xticks(layers if len(layers) <= 12 else layers[:: -(-len(layers) // 12)])
    axes.set_xlabel("layer")


def put_legend(figure: Any, axes: Any, title: str | None = None) -> None:
    """Puts a legend below all panels, where it covers no point."""
    handles, labels = axes.get_legend_handles_labels()
    # About 13 letters to the inch, and the handles.
    columns = int(13 * figure.get_figwidth() / (max(map(len, labels)) + 6))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), columns)),
        title=title, fontsize=9, title_fontsize=9,
    )  # fmt: skip


def label_layers(figure: Any, axes: Any, layers: list[int]) -> None:
    """Says which colour is which layer: a legend for a few, a bar for many."""
    if len(layers) <= 8:
        put_legend(figure, axes, "layer")
        return
    cm = importlib.import_module("matplotlib.cm")
    colors = importlib.import_module("matplotlib.colors")
    # The colours end at 0.88 of the map, before yellow that is hard to see on white.
    span = colors.Normalize(layers[0], layers[0] + (layers[-1] - layers[0]) / 0.88)
    bar = figure.colorbar(cm.ScalarMappable(span, "viridis"), ax=axes, label="layer")
    bar.ax.set_ylim(layers[0], layers[-1])


def draw_heads(
    rows: Rows, shown: Sequence[tuple[str, str, str, str]], line: tuple[float, str]
) -> tuple[Any, Any]:
    """Columns in percent by layer, a mark for each head: column, colour, marker, label."""
    figure, (axes,) = new_figure(width=7)
    layers = column(rows, "layer")
    for place, (key, colour, marker, label) in enumerate(shown):
        axes.plot(
            layers + (0.24 * place - 0.12), 100 * column(rows, key), marker, color=colour,
            alpha=0.75, label=label,
        )  # fmt: skip
    axes.axhline(line[0], color=GREY, ls="--", lw=1, label=line[1])
    mark_layers(axes, rows)
    put_legend(figure, axes)
    return figure, axes


def draw_sparsity(tables: Tables) -> Any:
    """Fraction of small entries, a dot for each head."""
    shown = (
        ("share", BLUE, "o", "keys that a query may see"),
        ("share_square", ORANGE, "^", "whole square, hidden keys counted too"),
    )
    figure, axes = draw_heads(tables["sparsity"], shown, (95, "95 %, which the paper reports"))
    axes.set(
        ylim=(0, 102), ylabel="entries below 1 % of\ntheir row's maximum (%)",
        title="Attention sparsity, one mark for each query head",
    )  # fmt: skip
    return figure


def draw_sinks(tables: Tables) -> Any:
    """Attention on the first tokens, a dot for each head."""
    even = 100 * tables["sinks"][0]["even_first_1"]
    shown = (("first_1", RED, "o", "first token"), ("first_4", BLUE, "^", "first 4 tokens"))
    figure, axes = draw_heads(tables["sinks"], shown, (even, "one token, if attention were even"))
    axes.set(
        yscale="log", ylabel="share of attention (%)",
        title="Attention that goes to the beginning, one mark for each query head",
    )  # fmt: skip
    return figure


def draw_ranks(tables: Tables) -> Any:
    """Rank plots by layer with the fitted tails."""
    figure, panels = new_figure(columns=2, width=10, height=4)
    rows, laws = tables["score_ranks"], tables["power_law"]
    layers = distinct(rows, "layer")
    colours = layer_colours(layers)
    for axes, kind in zip(panels, ("tokens", "words"), strict=True):
        for layer in layers:
            part = where(rows, of=kind, layer=layer)
            rank, score = column(part, "rank"), column(part, "score")
            axes.loglog(rank, score, "-", color=colours[layer], lw=1.6, label=str(layer))
            for law in where(laws, of=kind, layer=layer):
                slope = -1 / (law["exponent"] - 1)
                ends = np.array([1.0, law["tail"]])
                line = law["start"] * (ends / law["tail"]) ** slope
                axes.loglog(ends, line, ":", color="black", lw=1)
        low = column(where(rows, of=kind), "score")
        axes.set(
            xlabel="rank", title=f"accumulated score by {kind[:-1]}",
            ylim=(max(low.min(), low.max() / 1e5) * 0.7, low.max() * 1.6),
        )  # fmt: skip
    panels[0].set_ylabel("accumulated score (all heads)")
    panels[0].plot([], [], ":", color="black", label="power law")
    label_layers(figure, panels[0], layers)
    return figure


def draw_words(tables: Tables) -> Any:
    """Score against co-occurrence: of all a word's tokens, and of a single one."""
    figure, panels = new_figure(columns=2, width=10, height=3.8)
    rows, correlations = tables["word_scores"], tables["cooccurrence"]
    for axes, key, measure, label in (
        (panels[0], "score", "sum", "score of all the word's tokens"),
        (panels[1], "score_each", "each", "attention per query that can see it,\nmean of a token"),
    ):
        together = column(rows, "together")
        axes.loglog(together, column(rows, key), ".", color=BLUE, alpha=0.4, ms=5)
        (found,) = where(correlations, measure=measure, layer="all", against="together")
        axes.set(
            xlabel="times another word stands within 5 tokens", ylabel=label,
            title=f"Spearman {found['rho']:.2f}"
            f" (95 %: {found['low']:.2f} to {found['high']:.2f})",
        )  # fmt: skip
    return figure


def draw_ablation(tables: Tables) -> Any:
    """Perplexity ratios with some tokens hidden; bars are 95 % intervals."""
    rows = tables["ablation"]
    figure, (axes,) = new_figure(width=7.5)
    marks = {
        "heavy hidden": (RED, "o"),
        "random hidden": (GREY, "x"),
        "only heavy kept": (BLUE, "s"),
        "only random kept": (ORANGE, "^"),
    }
    shares = distinct(rows, "share")
    for offset, (condition, (colour, marker)) in enumerate(marks.items()):
        part = where(rows, condition=condition)
        ratio = column(part, "ratio")
        place = np.array([shares.index(row["share"]) for row in part]) + 0.14 * (offset - 1.5)
        spread = [ratio - column(part, "low"), column(part, "high") - ratio]
        axes.errorbar(
            place, ratio, yerr=spread, fmt=marker, color=colour, label=condition, capsize=2
        )
    axes.axhline(1, color="black", lw=0.8)
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000) if bottom < tick < top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(len(shares)), [f"{100 * share:g} % of the tokens" for share in shares])
    axes.grid(axis="x", visible=False)
    axes.set(
        ylabel="perplexity, times full attention's",
        title="What it costs to hide tokens (random: one mark for each draw)",
    )
    put_legend(figure, axes)
    return figure


def draw_policies(tables: Tables) -> Any:
    """Perplexity and retained attention by budget."""
    figure, (left, right) = new_figure(columns=2, width=10, height=3.8)
    draw_lines(left, tables["perplexity"], "share", "ratio")
    draw_lines(right, tables["retention"], "share", "mass", 100)
    shares = distinct(tables["perplexity"], "share")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="budget (% of the text)")
        axes.set_xticks(shares, [f"{100 * share:g}" for share in shares])
        axes.minorticks_off()
    left.axhline(1, color="black", lw=0.8)
    left.set(ylabel="perplexity, times full cache's", title="Second half of the text")
    right.set(
        ylabel="of full attention's mass (%)", title="Attention on what is held, mean of layers"
    )
    put_legend(figure, right)
    return figure


def draw_local_global(tables: Tables) -> Any:
    """How much of what H2O holds the policy that knows the future holds too."""
    rows = tables["local_global"]
    figure, panels = new_figure(columns=2, width=10, height=3.6)
    shares = distinct(rows, "share")
    for share, colour, marker in zip(shares, (RED, ORANGE, BLUE, GREEN), "osv^", strict=False):
        part, label = where(rows, share=share), f"{100 * share:g} % budget"
        for axes, key in zip(panels, ("layer", "step"), strict=True):
            places, means = mean_by(part, key, "overlap")
            axes.plot(places, 100 * np.array(means), color=colour, marker=marker, label=label)
            places, means = mean_by(part, key, "chance")
            axes.plot(places, 100 * np.array(means), ":", color=colour)
    mark_layers(panels[0], rows)
    panels[0].set(
        ylim=(0, 100), ylabel="of H2O's heavy hitters also\nheld by the oracle (%)",
        title="by layer (dotted: by chance)",
    )  # fmt: skip
    panels[1].set(ylim=(0, 100), xlabel="tokens read", title="mean of layers")
    put_legend(figure, panels[1])
    return figure


def draw_stays(tables: Tables) -> Any:
    """How long entries stay after the recent window."""
    rows = tables["stays"]
    figure, (left, right) = new_figure(columns=2, width=10, height=3.6)
    draw_lines(left, rows, "layer", "gone_at_once", 100)
    draw_lines(right, rows, "layer", "p90")
    left.set(ylabel="of entries (%)", title="Gone as soon as the window passed them")
    left.set_ylim(bottom=0)
    right.set(ylabel="tokens", title="A tenth of the entries stay longer than this")
    for axes in (left, right):
        mark_layers(axes, rows)
    put_legend(figure, left)
    return figure


def draw_agreement(tables: Tables) -> Any:
    """Similarity of what heads hold."""
    rows = tables["agreement"]
    figure, (axes,) = new_figure(width=6.4, height=5.2)
    heads = list(dict.fromkeys((row["layer"], row["head"]) for row in rows))
    square = column(rows, "jaccard").reshape(len(heads), len(heads))
    # The diagonal is 1 by definition and would flatten the rest.
    np.fill_diagonal(square, np.nan)
    image = axes.imshow(square, cmap="viridis", vmin=0)
    bar = figure.colorbar(image, ax=axes, label="Jaccard similarity")
    chance = rows[0]["chance"]
    bar.ax.axhline(chance, color="white", lw=2)
    ticks = list(range(0, len(heads), max(1, len(heads) // 16)))
    labels = [f"{heads[i][0]}.{heads[i][1]}" for i in ticks]
    axes.set_xticks(ticks, labels, rotation=90, fontsize=8)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.grid(visible=False)
    axes.set(
        xlabel="layer.head",
        title=f"Heavy hitters that two heads share\n(chance: {chance:.2f}, white line)",
    )
    return figure


def draw_bound(axes: Any, label: str = "") -> None:
    """Draws what the theorem asks for; mutates the axes."""
    axes.axhline(FACTOR, color="black", ls="--", lw=1, label=label)
    axes.set(ylim=(0, 1.04), xlabel="tokens read")


def draw_theory(tables: Tables) -> Any:
    """Greedy against the best of all sets, by step."""
    figure, panels = new_figure(columns=3, width=11, height=3.7)
    parts = (
        ("real", "identity", "real rows, h = identity"),
        ("real", "sqrt", "real rows, h = sqrt of each row"),
        ("late star", "identity", "made to fail: 'late star'"),
    )
    for axes, (case, h, title) in zip(panels, parts, strict=True):
        rows = where(tables["theory_steps"], case=case, h=h, objective="rows")
        rows = [row for row in rows if row["policy"] in ("heavy", "h2o", "belady")]
        draw_lines(axes, rows, "step", "mean")
        for policy in distinct(rows, "policy"):
            own = where(rows, policy=policy)
            axes.fill_between(
                column(own, "step"), column(own, "lowest"), column(own, "mean"),
                color=STYLES[policy]["color"], alpha=0.13,
            )  # fmt: skip
        draw_bound(axes)
        axes.set_title(title)
    panels[0].set_ylabel("worth, share of the best set's")
    put_legend(figure, panels[2])
    panels[0].annotate(
        "1 - 1/e", (0, FACTOR), xycoords=("axes fraction", "data"), xytext=(4, -10),
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    return figure


def draw_mass(tables: Tables) -> Any:
    """Attention retained on small cases: policies, Belady, the best possible."""
    rows = tables["theory_mass"]
    figure, (axes,) = new_figure(width=7.5)
    for place, name in enumerate(("heavy", "h2o", "belady", "best")):
        cases, means = mean_by(rows, "case", name)
        axes.bar(
            np.arange(len(cases)) + 0.2 * (place - 1.5), 100 * np.array(means), 0.18,
            color=STYLES.get(name, {"color": GREY})["color"], label=LABELS.get(name, name),
        )  # fmt: skip
    axes.set_xticks(range(len(cases)), cases)
    axes.grid(axis="x", visible=False)
    axes.set(
        ylim=(0, 102), ylabel="of full attention's mass (%)",
        title="Attention retained, 4 of 14 tokens held",
    )  # fmt: skip
    put_legend(figure, axes)
    return figure


def draw_long(tables: Tables) -> Any:
    """Greedy against the best set on the whole text; bands span the heads."""
    rows = tables["theory_long"]
    figure, (axes,) = new_figure(width=7)
    draw_lines(axes, rows, "step", "ratio")
    for policy in distinct(rows, "policy"):
        part = where(rows, policy=policy)
        by_step = {step: column(where(part, step=step), "ratio") for step in distinct(part, "step")}
        ends = [[own.min() for own in by_step.values()], [own.max() for own in by_step.values()]]
        axes.fill_between(list(by_step), *ends, color=STYLES[policy]["color"], alpha=0.13)
    draw_bound(axes, "1 - 1/e")
    axes.set(
        ylabel="worth, share of the best set's",
        title="The whole text at a 20 % budget, mean and range of heads",
    )
    put_legend(figure, axes)
    return figure


def draw_neurons(tables: Tables) -> Any:
    """How often neurons are active, by rank."""
    rows = tables["neurons"]
    figure, (axes,) = new_figure(width=7)
    layers = distinct(rows, "layer")
    for layer, colour in layer_colours(layers).items():
        part = where(rows, layer=layer)
        frequency = 100 * column(part, "frequency").clip(1e-5)
        axes.loglog(column(part, "rank"), frequency, color=colour, label=str(layer))
    axes.set_ylim(bottom=0.02)
    axes.set(
        xlabel="rank of the neuron", ylabel="active at this share of tokens (%)",
        title="Activation frequency of MLP neurons",
    )  # fmt: skip
    label_layers(figure, axes, layers)
    return figure
