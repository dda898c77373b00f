"""The tables of the card: as markdown and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

Row = dict[str, object]
Columns = dict[str, tuple[str, Callable[[object], str]]]  # heading, and how a value is written

_percent = "{:.1%}".format
_number = "{:.2f}".format
_ratio = "{:.4f}".format

PERPLEXITY: Columns = {
    "book": ("book", str),
    "tokens": ("tokens", "{:,}".format),
    "perplexity": ("perplexity per token", _number),
    "bits_per_byte": ("bits per byte", _number),
}
RECALL: Columns = {
    "distance": ("distance", str),
    "answers": ("answers", str),
    "recall": ("recall", _percent),
    "recall_alone": ("one", _percent),
    "recall_with_rivals": ("several", _percent),
}
FIRST_POSITION: Columns = {
    "layer": ("layer", str),
    "mean": ("mean", _percent),
    "highest_head": ("highest head", _percent),
}
EVICTION: Columns = {
    "policy": ("policy", str),
    "share": ("budget", "{:.0%}".format),
    "tokens": ("tokens", str),
    "text_perplexity": ("perplexity, text", _number),
    "text_ratio": ("to full", _ratio),
    "fact_perplexity": ("perplexity, facts", _number),
    "fact_ratio": ("to full", _ratio),
    "recall": ("recall", _percent),
    "alone_recall": ("one", _percent),
    "far_recall": ("far", _percent),
}
HEAVY: Columns = {
    "layer": ("layer", str),
    "median_position": ("median position", "{:.0f}".format),
    "from_prompt": ("from the prompt", _percent),
    "from_first_quarter": ("from its first quarter", _percent),
}


def markdown(rows: list[Row], columns: Columns) -> str:
    """Make a table.

    Args:
        rows: What to show, one dict for each line.
        columns: Which keys to show, with heading and format.

    Returns:
        The lines of the table.
    """
    lines = ["| " + " | ".join(heading for heading, _ in columns.values()) + " |"]
    lines.append("|" + "---|" * len(columns))
    for row in rows:
        cells = (write(row[name]) for name, (_, write) in columns.items())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write rows of equal keys, numbers with six digits.

    Args:
        path: The file.
        rows: At least one row.
    """
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
