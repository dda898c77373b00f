"""Where weights and caches may be, as the command line names the places."""

from __future__ import annotations

import re

PLACES = ("device", "cpu", "disk")
CACHE_TIERS = ("device", "cpu", "file")
Fractions = dict[str, float]  # fractions by place that add up to 1


def parse_placement(option: str, text: str, places: tuple[str, ...]) -> Fractions | None:
    """Parses ``auto`` (``None``), a place, or percentages such as ``device=40,disk=60``."""
    if text == "auto":
        return None
    if text in places:
        return {text: 1.0}
    parts = [re.fullmatch(r"(\w+)=(\d*\.?\d+)%?", part.strip()) for part in text.split(",")]
    fractions = {part[1]: float(part[2]) / 100 for part in parts if part is not None}
    if len(fractions) < len(parts) or not fractions.keys() <= set(places):
        raise ValueError(
            f"--{option} {text!r} is not a place; give auto, {', '.join(places)}, or percentages"
            f" such as {places[0]}=40,{places[-1]}=60"
        )
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(
            f"--{option} {text!r} adds up to {100 * sum(fractions.values()):g} percent; give 100"
        )
    return fractions
