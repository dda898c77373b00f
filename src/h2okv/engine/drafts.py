"""Speculation by prompt lookup: what followed the newest tokens where the text had them before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

_LONGEST, _SHORTEST = 4, 2  # tokens of a text that a draft continues
_SHARE = 0.04  # of the time of plain steps that drafts may cost
_MOST_STEPS = 4  # plain steps whose time drafts may have saved for later
_FIRST_STEPS, _PLAIN_STEPS = 3, 9  # plain steps before the first draft, and of the median


class PromptLookup:
    """Drafts tokens of one sequence, where the same tokens came before (arXiv 2304.04487)."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def draft(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens that may follow; mutates the index."""
        # Not the end of the text itself, which every text has.
        for end in range(self._num_indexed + 1, len(tokens)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            start = self._ends.get(tuple(tokens[-length:]))
            if start is not None:
                return tuple(tokens[start : start + limit])
        return ()


class DraftGain:
    """Whether the next step may bring drafts, by the seconds of steps with and without them.

    Drafts draw on a credit: they add the time that they save, and take what they cost beyond it.
    Plain steps add a share of their own time, so that drafts are tried again now and then, and all
    drafts that do not pay take no more than this share. One object for each number of sequences.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)  # seconds of steps without drafts
        self._credit = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the next step may bring drafts."""
        return len(self._plain) >= _FIRST_STEPS and self._credit > 0

    def record(self, seconds: float, num_tokens: float, has_drafts: bool) -> None:
        """Record a decode step and its mean number of tokens of a sequence; mutates."""
        if not has_drafts:
            self._plain.append(seconds)
        plain = median(self._plain or [seconds])
        self._credit += num_tokens * plain - seconds if has_drafts else _SHARE * seconds
        # What a text has saved must not pay for the next one for long.
        self._credit = min(self._credit, _MOST_STEPS * plain)

    def spend(self, seconds: float) -> None:
        """Record the time that taking drafts back has cost after their step; mutates."""
        self._credit -= seconds
