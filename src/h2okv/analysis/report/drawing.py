"""What all figures share: paper, ink and colours that everybody can tell apart."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

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
    """Makes an empty figure with some panels side by side.

    Args:
        columns: how many panels.
        width: in inches.
        height: in inches.

    Returns:
        The figure and its axes.

    Raises:
        ValueError: naming the extra that brings matplotlib, if it is not installed.
    """
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


def label_layers(figure: Any, axes: Any, layers: list[int]) -> None:
    """Says which colour is which layer: a legend for a few, a bar for many."""
    if len(layers) <= 8:
        axes.legend(title="layer", fontsize=8, title_fontsize=8)
        return
    cm = importlib.import_module("matplotlib.cm")
    colors = importlib.import_module("matplotlib.colors")
    # The colours end at 0.88 of the map, before yellow that is hard to see on white.
    span = colors.Normalize(layers[0], layers[0] + (layers[-1] - layers[0]) / 0.88)
    bar = figure.colorbar(cm.ScalarMappable(span, "viridis"), ax=axes, label="layer")
    bar.ax.set_ylim(layers[0], layers[-1])
