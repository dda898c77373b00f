"""Speculation by prompt lookup: what followed the newest tokens where the text had them before."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST, _SHORTEST = 4, 2  # tokens of a text that a draft continues
# Verified drafts before the gain is judged, and plain steps before drafts are tried again.
_TRIALS, _PAUSE = 6, 96
_SMOOTHING = 0.2


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
    """Whether drafts have paid so far, by the seconds of steps with and without them."""

    def __init__(self) -> None:
        self._plain: float | None = None  # seconds of a token without drafts
        self._drafted: float | None = None  # seconds of a token with them
        self._num_trials = self._pause = 0

    @property
    def is_open(self) -> bool:
        """Whether the next step may bring drafts."""
        if self._plain is None or self._pause:
            return False
        return self._num_trials < _TRIALS or (self._drafted or 0.0) < self._plain

    def record(self, seconds: float, num_tokens: int, has_drafts: bool) -> None:
        """Record a decode step of one sequence and the tokens that it gave; mutates."""
        per_token = seconds / num_tokens
        if not has_drafts:
            self._plain = _smooth(self._plain, per_token)
            self._pause = max(0, self._pause - 1)
            return
        self._drafted = _smooth(self._drafted, per_token)
        self._num_trials += 1
        if self._num_trials >= _TRIALS and self._plain is not None and not self.is_open:
            self._pause, self._num_trials, self._drafted = _PAUSE, _TRIALS - 1, None


def _smooth(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SMOOTHING * (value - mean)
