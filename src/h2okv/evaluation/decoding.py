"""How an answer is chosen, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token, anything above draws from the distribution.
        top_p: Draws among the likeliest tokens that hold this much of the probability.
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what nothing can be drawn with."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature {self.temperature:g} is out of range; give 0 (always the likeliest"
                " token) or a positive number such as 0.3"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p {self.top_p:g} is out of range; give a share above 0 and up to 1"
            )


def text_before(text: str, stops: Sequence[str]) -> str:
    """Cuts a text where the first of some strings begins."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
