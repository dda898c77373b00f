"""Pictures: made without a display, in colours that stay apart, and written or refused early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h2okv.console import optional
from h2okv.records import naming

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which stay apart for colour-blind readers; line styles and markers help
# in grey.
BLUE, RED, GREEN, PINK, SKY, ORANGE = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00",
)  # fmt: skip
MARKERS = "osD^vPX*"


def check_plot(path: Path) -> None:
    """Finds out before a long run whether its picture can be made."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"'{path}' is not a picture's name; let it end in {', '.join(SUFFIXES)}")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Any:
    """Makes an empty picture."""
    figure = optional("matplotlib.figure", "a picture", "plot")
    return figure.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Writes a picture."""
    with naming(path, "written", "choose another place"):
        figure.savefig(path, dpi=150)
