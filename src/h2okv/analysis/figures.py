"""The report's figures."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from h2okv.analysis.theory import FACTOR

Rows = list[dict[str, Any]]

COLOURS = {
    "h2o": "#0072B2",
    "global": "#CC79A7",
    "recent": "#E69F00",
    "sink_recent": "#009E73",
    "random": "#7F7F7F",
}
"""Of the Okabe-Ito palette."""
BLUE, ORANGE, GREEN, GREY, RED = "#0072B2", "#E69F00", "#009E73", "#7F7F7F", "#D55E00"
MARKERS = {"h2o": "o", "global": "s", "recent": "^", "sink_recent": "v", "random": "x"}

_STYLE = {
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
    "figure.constrained_layout.use": True,
}


def new_figure(columns: int = 1, width: float = 8.0, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Makes an empty figure with some panels side by side."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        backend = importlib.import_module("matplotlib.backends.backend_agg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            "matplotlib is not installed, which figures need; pip install 'h2okv[analysis]'."
        ) from error
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(width, height))
        backend.FigureCanvasAgg(figure)
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


def layer_colours(layers: list[int]) -> dict[int, Any]:
    """Gives each layer a colour, from dark to light with depth."""
    colormaps = importlib.import_module("matplotlib").colormaps
    places = np.linspace(0.0, 0.88, max(2, len(layers)))
    return {
        layer: colormaps["viridis"](place) for layer, place in zip(layers, places, strict=False)
    }


def mark_layers(axes: Any, layers: list[int]) -> None:
    """Labels the horizontal axis with layers, not more of them than fit."""
    shown = layers if len(layers) <= 12 else layers[:: -(-len(layers) // 12)]
    axes.set_xticks(shown)
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


def draw_ablation(tables: dict[str, Rows]) -> Any:
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
    axes.set_ylabel("perplexity, times full attention's")
    axes.set_title("What it costs to hide tokens (random: one mark for each draw)")
    put_legend(figure, axes)
    return figure


def draw_policies(tables: dict[str, Rows]) -> Any:
    """Perplexity and retained attention by budget."""
    figure, (left, right) = new_figure(columns=2, width=10, height=3.8)
    rows, masses = tables["perplexity"], tables["retention"]
    for policy in distinct(rows, "policy"):
        style = {"color": COLOURS[policy], "marker": MARKERS[policy]}
        part = where(rows, policy=policy)
        share = 100 * column(part, "share")
        left.plot(share, column(part, "ratio"), label=policy, **style)
        mean = [
            100 * column(where(masses, policy=policy, share=row["share"]), "mass").mean()
            for row in part
        ]
        right.plot(share, mean, label=policy, **style)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(share, [f"{value:g}" for value in share])
        axes.minorticks_off()
        axes.set_xlabel("budget (% of the text)")
    left.axhline(1, color="black", lw=0.8)
    left.set_ylabel("perplexity, times full cache's")
    left.set_title("Second half of the text")
    right.set_ylabel("of full attention's mass (%)")
    right.set_title("Attention on what is held, mean of layers")
    put_legend(figure, right)
    return figure


def draw_local_global(tables: dict[str, Rows]) -> Any:
    """How much of what H2O holds the policy that knows the future holds too."""
    rows = tables["local_global"]
    figure, panels = new_figure(columns=2, width=10, height=3.6)
    shares = distinct(rows, "share")
    for share, colour, marker in zip(shares, (RED, ORANGE, BLUE, GREEN), "osv^", strict=False):
        part = where(rows, share=share)
        steps = distinct(part, "step")
        label = f"{100 * share:g} % budget"
        for axes, key, places in (
            (panels[0], "layer", distinct(part, "layer")),
            (panels[1], "step", steps),
        ):
            for name, line in (("overlap", "-"), ("chance", ":")):
                mean = [100 * column(where(part, **{key: p}), name).mean() for p in places]
                axes.plot(
                    places, mean, line, color=colour, marker=marker if line == "-" else "",
                    label=label if line == "-" else None,
                )  # fmt: skip
    panels[0].set_ylabel("of H2O's heavy hitters also\nheld by the oracle (%)")
    mark_layers(panels[0], distinct(rows, "layer"))
    panels[0].set_title("by layer (dotted: by chance)")
    panels[1].set_xlabel("tokens read")
    panels[1].set_title("mean of layers")
    for axes in panels:
        axes.set_ylim(0, 100)
    put_legend(figure, panels[1])
    return figure


def draw_stays(tables: dict[str, Rows]) -> Any:
    """How long entries stay after the recent window."""
    rows = tables["stays"]
    figure, (left, right) = new_figure(columns=2, width=10, height=3.6)
    for policy in distinct(rows, "policy"):
        part = where(rows, policy=policy)
        layers = column(part, "layer")
        style = {"color": COLOURS[policy], "marker": MARKERS[policy], "label": policy}
        left.plot(layers, 100 * column(part, "gone_at_once"), **style)
        right.plot(layers, column(part, "p90"), **style)
    left.set_ylabel("of entries (%)")
    left.set_ylim(bottom=0)
    left.set_title("Gone as soon as the window passed them")
    right.set_ylabel("tokens")
    right.set_title("A tenth of the entries stay longer than this")
    for axes in (left, right):
        mark_layers(axes, sorted({row["layer"] for row in rows}))
    put_legend(figure, left)
    return figure


def draw_agreement(tables: dict[str, Rows]) -> Any:
    """Similarity of what heads hold."""
    rows = tables["agreement"]
    figure, (axes,) = new_figure(width=6.4, height=5.2)
    names = [(row["layer"], row["head"]) for row in rows]
    heads = list(dict.fromkeys(names))
    square = column(rows, "jaccard").reshape(len(heads), len(heads))
    # The diagonal is 1 by definition and would flatten the rest.
    np.fill_diagonal(square, np.nan)
    image = axes.imshow(square, cmap="viridis", vmin=0)
    bar = figure.colorbar(image, ax=axes, label="Jaccard similarity")
    bar.ax.axhline(rows[0]["chance"], color="white", lw=2)
    step = max(1, len(heads) // 16)
    ticks = list(range(0, len(heads), step))
    labels = [f"{heads[i][0]}.{heads[i][1]}" for i in ticks]
    axes.set_xticks(ticks, labels, rotation=90, fontsize=8)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.grid(visible=False)
    axes.set_xlabel("layer.head")
    axes.set_title(
        f"Heavy hitters that two heads share\n(chance: {rows[0]['chance']:.2f}, white line)"
    )
    return figure


def draw_theory(tables: dict[str, Rows]) -> Any:
    """Greedy against the best of all sets, by step."""
    rows = tables["theory_steps"]
    figure, panels = new_figure(columns=3, width=11, height=3.7)
    styles = {
        "heavy": ("heavy (the paper's greedy)", BLUE, "o"),
        "h2o": ("h2o (half recent)", ORANGE, "^"),
        "belady": ("Belady (future)", GREEN, "s"),
    }
    parts = (
        ("real", "identity", "real rows, h = identity"),
        ("real", "sqrt", "real rows, h = sqrt of each row"),
        ("late star", "identity", "made to fail: 'late star'"),
    )
    for axes, (case, h, title) in zip(panels, parts, strict=True):
        part = where(rows, case=case, h=h, objective="rows")
        for policy, (label, colour, marker) in styles.items():
            own = where(part, policy=policy)
            steps = column(own, "step")
            axes.plot(steps, column(own, "mean"), color=colour, marker=marker, ms=4, label=label)
            axes.fill_between(
                steps, column(own, "lowest"), column(own, "mean"), color=colour, alpha=0.13
            )
        axes.axhline(FACTOR, color="black", ls="--", lw=1)
        axes.set_ylim(0, 1.04)
        axes.set_title(title)
        axes.set_xlabel("tokens read")
    panels[0].set_ylabel("worth, share of the best set's")
    put_legend(figure, panels[2])
    panels[0].annotate(
        "1 - 1/e", (0, FACTOR), xycoords=("axes fraction", "data"), xytext=(4, -10),
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    return figure


def draw_mass(tables: dict[str, Rows]) -> Any:
    """Attention retained on small cases: policies, Belady, the best possible."""
    rows = tables["theory_mass"]
    figure, (axes,) = new_figure(width=7.5)
    cases = distinct(rows, "case")
    names = (("heavy", BLUE), ("h2o", ORANGE), ("belady", GREEN), ("best", GREY))
    for place, (name, colour) in enumerate(names):
        heights = [100 * column(where(rows, case=case), name).mean() for case in cases]
        label = {"belady": "Belady (future)", "best": "best possible"}.get(name, name)
        axes.bar(np.arange(len(cases)) + 0.2 * (place - 1.5), heights, 0.18,
                 color=colour, label=label)  # fmt: skip
    axes.set_xticks(range(len(cases)), cases)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 102)
    axes.set_ylabel("of full attention's mass (%)")
    axes.set_title("Attention retained, 4 of 14 tokens held")
    put_legend(figure, axes)
    return figure


def draw_long(tables: dict[str, Rows]) -> Any:
    """Greedy against the best set on the whole text; bands span the heads."""
    rows = tables["theory_long"]
    figure, (axes,) = new_figure(width=7)
    styles = {"heavy": (BLUE, "o"), "h2o": (ORANGE, "^"), "global": (COLOURS["global"], "s")}
    for policy, (colour, marker) in styles.items():
        part = where(rows, policy=policy)
        steps = distinct(part, "step")
        by_step = [column(where(part, step=step), "ratio") for step in steps]
        mean = [values.mean() for values in by_step]
        axes.plot(steps, mean, color=colour, marker=marker, label=policy)
        ends = ([values.min() for values in by_step], [values.max() for values in by_step])
        axes.fill_between(steps, *ends, color=colour, alpha=0.13)
    axes.axhline(FACTOR, color="black", ls="--", lw=1, label="1 - 1/e")
    axes.set_ylim(0, 1.04)
    axes.set_xlabel("tokens read")
    axes.set_ylabel("worth, share of the best set's")
    axes.set_title("The whole text at a 20 % budget, mean and range of heads")
    put_legend(figure, axes)
    return figure


def draw_sparsity(tables: dict[str, Rows]) -> Any:
    """Share of small entries, a dot for each head."""
    rows = tables["sparsity"]
    figure, (axes,) = new_figure(width=7)
    layers = column(rows, "layer")
    for key, colour, marker, label, shift in (
        ("share", BLUE, "o", "keys that a query may see", -0.12),
        ("share_square", ORANGE, "^", "whole square, hidden keys counted too", 0.12),
    ):
        axes.plot(
            layers + shift, 100 * column(rows, key), marker, color=colour, alpha=0.75, label=label
        )
    axes.axhline(95, color=GREY, ls="--", lw=1, label="95 %, which the paper reports")
    axes.set_ylim(0, 102)
    axes.set_ylabel("entries below 1 % of\ntheir row's maximum (%)")
    axes.set_title("Attention sparsity, one mark for each query head")
    mark_layers(axes, sorted(set(layers.astype(int))))
    put_legend(figure, axes)
    return figure


def draw_ranks(tables: dict[str, Rows]) -> Any:
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
        axes.set_xlabel("rank")
        axes.set_title(f"accumulated score by {kind[:-1]}")
        low = column(where(rows, of=kind), "score")
        axes.set_ylim(max(low.min(), low.max() / 1e5) * 0.7, low.max() * 1.6)
    panels[0].set_ylabel("accumulated score (all heads)")
    panels[0].plot([], [], ":", color="black", label="power law")
    label_layers(figure, panels[0], layers)
    return figure


def draw_words(tables: dict[str, Rows]) -> Any:
    """Score against co-occurrence: of all a word's tokens, and of a single one."""
    figure, panels = new_figure(columns=2, width=10, height=3.8)
    rows, correlations = tables["word_scores"], tables["cooccurrence"]
    together = column(rows, "together")
    for axes, key, measure, title in (
        (panels[0], "score", "sum", "score of all the word's tokens"),
        (panels[1], "score_each", "each", "attention per query that can see it,\nmean of a token"),
    ):
        axes.loglog(together, column(rows, key), ".", color=BLUE, alpha=0.4, ms=5)
        (found,) = where(correlations, measure=measure, layer="all", against="together")
        axes.set_title(
            f"Spearman {found['rho']:.2f} (95 %: {found['low']:.2f} to {found['high']:.2f})"
        )
        axes.set_xlabel("times another word stands within 5 tokens")
        axes.set_ylabel(title)
    return figure


def draw_sinks(tables: dict[str, Rows]) -> Any:
    """Attention on the first token, a dot for each head."""
    rows = tables["sinks"]
    figure, (axes,) = new_figure(width=7)
    layers = column(rows, "layer")
    for key, colour, marker, label, shift in (
        ("first_1", RED, "o", "first token", -0.12),
        ("first_4", BLUE, "^", "first 4 tokens", 0.12),
    ):
        share = 100 * column(rows, key)
        axes.semilogy(layers + shift, share, marker, color=colour, alpha=0.75, label=label)
    even = 100 * rows[0]["even_first_1"]
    axes.axhline(even, color=GREY, ls="--", lw=1, label="one token, if attention were even")
    axes.set_ylabel("share of attention (%)")
    axes.set_title("Attention that goes to the beginning, one mark for each query head")
    mark_layers(axes, sorted(set(layers.astype(int))))
    put_legend(figure, axes)
    return figure


def draw_neurons(tables: dict[str, Rows]) -> Any:
    """How often neurons are active, by rank."""
    rows = tables["neurons"]
    figure, (axes,) = new_figure(width=7)
    layers = distinct(rows, "layer")
    colours = layer_colours(layers)
    for layer in layers:
        part = where(rows, layer=layer)
        axes.loglog(
            column(part, "rank"), 100 * column(part, "frequency").clip(1e-5),
            color=colours[layer], label=str(layer),
        )  # fmt: skip
    axes.set_ylim(bottom=0.02)
    axes.set_xlabel("rank of the neuron")
    axes.set_ylabel("active at this share of tokens (%)")
    axes.set_title("Activation frequency of MLP neurons")
    label_layers(figure, axes, layers)
    return figure
