"""Tiers for weights and caches, by their names on the command line."""

from __future__ import annotations

import re

WEIGHT_TIERS = ("device", "cpu", "disk")
CACHE_TIERS = ("device", "cpu", "file")
Fractions = dict[str, float]  # by tier; they add up to 1


def parse_placement(option: str, text: str, tiers: tuple[str, ...]) -> Fractions | None:
    """Parse ``auto`` (``None``), a tier, or percentages such as ``device=40,disk=60``."""
    if text == "auto":
        return None
    if text in tiers:
        return {text: 1.0}
    matches = [re.fullmatch(r"(\w+)=(\d*\.?\d+)%?", entry.strip()) for entry in text.split(",")]
    fractions = {match[1]: float(match[2]) / 100 for match in matches if match is not None}
    if len(fractions) < len(matches) or not fractions.keys() <= set(tiers):
        raise ValueError(
            f"--{option} must be auto, {', '.join(tiers)}, or percentages such as"
            f" {tiers[0]}=40,{tiers[-1]}=60, got {text!r}"
        )
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(
            f"--{option} {text!r} adds up to {100 * sum(fractions.values()):g} percent; give 100"
        )
    return fractions
