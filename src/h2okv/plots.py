"""Figures, drawn without a display, in distinguishable colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h2okv.console import optional
from h2okv.records import naming

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles and markers help
# in greyscale.
BLUE, RED, GREEN, PINK, SKY, ORANGE = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00",
)  # fmt: skip
MARKERS = "osD^vPX*"


def check_plot(path: Path) -> None:
    """Raise ValueError, before a long run, if its figure cannot be drawn or has a wrong suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"'{path}' is not the name of a figure; it must end in {', '.join(SUFFIXES)}"
        )
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches."""
    figure = optional("matplotlib.figure", "a picture", "plot")
    return figure.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file."""
    with naming(path, "written", "choose another path"):
        figure.savefig(path, dpi=150)
