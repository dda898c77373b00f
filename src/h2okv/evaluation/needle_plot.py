"""The heat map of needles: length across, depth down, one map for each cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from h2okv.evaluation.stream_plot import new_figure, save_figure

_COLOURS = "viridis"
_COLUMNS = 3
_PANEL = 3.2
_DARK = 0.6


def plot_needles(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draws what share of the needles was found.

    Args:
        path: The picture's file; its suffix says which kind.
        rows: Of `NeedleTask.details`, with `policy` and `budget`; at least one.
        title: What stands above.

    Raises:
        ValueError: If the picture cannot be made.
    """
    panels: dict[str, dict[tuple[int, float], float]] = {}
    for row in rows:
        panel = panels.setdefault(_name(row), {})
        panel[row["length"], row["depth"]] = row["string_match"]
    columns = min(_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = new_figure(max(_PANEL * columns, 5), _PANEL * lines + 0.8)
    figure.suptitle(title)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    all_axes = grid.flatten().tolist()
    for axes, (name, cells) in zip(all_axes, panels.items(), strict=False):
        lengths = sorted({length for length, _ in cells})
        depths = sorted({depth for _, depth in cells})
        image = _draw(axes, cells, lengths, depths)
        axes.set_title(name, fontsize="medium")
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("length, tokens")
    figure.supylabel("depth of the needle, %")
    figure.colorbar(image, ax=all_axes, label="share found")
    save_figure(figure, path)


def _draw(
    axes: Any,
    cells: Mapping[tuple[int, float], float],
    lengths: Sequence[int],
    depths: Sequence[float],
) -> Any:
    """Draws one map, with the number in each of its cells."""
    values = [[cells[length, depth] for length in lengths] for depth in depths]
    image = axes.imshow(values, cmap=_COLOURS, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}" for depth in depths])
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            colour = "black" if value > _DARK else "white"
            axes.text(x, y, f"{value:.2g}", ha="center", va="center", color=colour, fontsize=8)
    return image


def _name(row: Mapping[str, Any]) -> str:
    cache = "full" if row["policy"] == "full" else f"{row['policy']} {row['budget']}"
    return f"{cache}\nquestion {row['question']}"
