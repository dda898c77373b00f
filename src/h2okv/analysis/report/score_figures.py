"""Figures about attention and its sums: sparsity, rank plots, words, sinks, neurons."""

from __future__ import annotations

from typing import Any

import numpy as np

from h2okv.analysis.report.drawing import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Rows,
    column,
    distinct,
    label_layers,
    layer_colours,
    mark_layers,
    new_figure,
    where,
)


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
    axes.legend(loc="lower right")
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
    axes.legend(loc="upper left", fontsize=9)
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
