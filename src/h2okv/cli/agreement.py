"""How far two generations of the same prompt agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Two runs of tokens, compared place by place.

    Attributes:
        compared: Places, as many as the longer run has.
        equal: Places where both have the same token.
        first_difference: The first place where they differ, from 0; None if they never do.
    """

    compared: int
    equal: int
    first_difference: int | None

    @classmethod
    def of(cls, tokens: Sequence[int], others: Sequence[int]) -> Agreement:
        """Compares two runs; a place that only one of them has counts as a difference."""
        compared = max(len(tokens), len(others))
        same = [a == b for a, b in zip(tokens, others, strict=False)]
        same += [False] * (compared - len(same))
        first = same.index(False) if False in same else None
        return cls(compared, sum(same), first)
