"""How far a generation agrees with that of the full cache."""

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
        same_next_token: Places of the full cache's text where the other cache, after that same
            text, would choose the same token; None if it was not asked.
    """

    compared: int
    equal: int
    first_difference: int | None
    same_next_token: int | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int], full: Sequence[int], same_next_token: int | None = None
    ) -> Agreement:
        """Compares two runs; a place that only one of them has counts as a difference."""
        compared = max(len(tokens), len(full))
        same = [a == b for a, b in zip(tokens, full, strict=False)]
        same += [False] * (compared - len(same))
        first = same.index(False) if False in same else None
        return cls(compared, sum(same), first, same_next_token)
