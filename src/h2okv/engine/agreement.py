"""How often the next token is the full cache's: a bound by answers, and the budget that holds it.

Numbers only. An answer is one observation, however many tokens it has: one early difference moves
all tokens after it. Of one budget and kind of request, with ``n_i`` tokens compared and ``a_i``
equal in answer i, the agreement is the ratio ``sum a / sum n``; its variance is that of the
jackknife over answers, with half an answer added of which half the tokens differ, so that a few
answers without a difference prove little. The variance gives an effective number of tokens, for
which the lower bound is Wilson's (1927) with Student's quantile for Kish's effective number of
answers. Several kinds are joined by weight and by the squares of the distances to their bounds
(Zou and Donner 2008). ``tests/engine/test_agreement.py`` measures how often the bound holds.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 200
"""Answers that a bound is computed from, the newest: of each budget and kind, and of all."""


@dataclass(frozen=True)
class Agreement:
    """Share of next tokens that are the full cache's, of one budget and kind, or of all.

    Attributes:
        answers: Answers that were read again.
        tokens: Their tokens that were compared.
        agreement: Share of these whose next token is the same.
        bound: Lower bound of the share, which holds with a probability of 95 %.
        budget: The budget in a few characters; empty for all.
        kind: The kind of request; empty for all.
    """

    answers: int
    tokens: int
    agreement: float
    bound: float
    budget: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return f"{100 * self.agreement:.1f} % (95 % bound {100 * self.bound:.1f})"


@dataclass(frozen=True)
class AgreementReport:
    """How often the next token was the full cache's, of the answers that were read again.

    Attributes:
        verify: Share of all tokens that are read again.
        goal: What `EngineConfig.agreement` demands, if anything.
        total: Of all traffic, by what was written; ``None`` before the first answer.
        rows: Of each budget and kind of request.
        missed: Kinds for which the largest budget does not reach the goal.
    """

    verify: float
    goal: float | None = None
    total: Agreement | None = None
    rows: Sequence[Agreement] = ()
    missed: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.total is None:
            return "no answer has been read again with the full cache yet"
        answers, tokens = self.total.answers, self.total.tokens
        text = (
            f"on your traffic {self.total} of the next tokens are the full cache's"
            f" ({answers:,} answer{'s'[: answers != 1]}, {tokens:,} tokens)"
        )
        if self.goal is not None and self.missed:
            kinds = ", ".join(self.missed)
            text += f"; below {100 * self.goal:g} % at the largest budget: {kinds}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers and the text, ready for JSON."""
        return {**asdict(self), "text": str(self)}


def lower_bound(tokens: Sequence[int], agreed: Sequence[int]) -> float:
    """Return the 95 % lower bound of the share of tokens that agree, from one entry per answer."""
    total = sum(tokens)
    if len(tokens) < 2:
        return 0.0
    extra = total / len(tokens) / 2
    pairs = [*zip(tokens, agreed, strict=True), (extra, extra / 2)]
    size, share = total + extra, sum(agreed) / total
    pulled = (sum(agreed) + extra / 2) / size
    variance = sum(((a - pulled * n) / (size - n)) ** 2 for n, a in pairs)
    effective = 1 / max(variance / (pulled * (1 - pulled)), 1 / size)
    quantile = _student(max(1.0, size**2 / sum(n * n for n, _ in pairs) - 1))
    spread = quantile**2 / effective
    width = quantile * math.sqrt(share * (1 - share) / effective + spread / (4 * effective))
    return max(0.0, (share + spread / 2 - width) / (1 + spread))


def _student(degrees: float) -> float:
    """Return Student's 95 % quantile, by the expansion of Abramowitz and Stegun 26.7.5."""
    z, d = 1.6448536269514722, degrees  # z: of the normal distribution
    first, second = (z**3 + z) / (4 * d), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
    return z + first + second + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)


class AgreementLog:
    """What was compared, by budget and kind of request; may be read from any thread."""

    def __init__(self, window: int = WINDOW) -> None:
        # ``(number, tokens, agreed, weight)``, where the weight is all tokens written since the
        # answer before, read again or not; and those since the newest.
        self._answers: dict[tuple[str, str], deque[tuple[int, int, int, int]]]
        self._answers = defaultdict(lambda: deque(maxlen=window))
        self._unseen: Counter[tuple[str, str]] = Counter()
        self._size, self._count, self._lock = window, 0, threading.Lock()

    def write(self, budget: str, kind: str, tokens: int) -> None:
        """Count the tokens of an answer, whether it is read again or not."""
        with self._lock:
            self._unseen[budget, kind] += tokens

    def add(self, budget: str, kind: str, tokens: int, agreed: int) -> None:
        """Note an answer that was read again."""
        with self._lock:
            weight = max(self._unseen.pop((budget, kind), 0), tokens)
            self._answers[budget, kind].append((self._count, tokens, agreed, weight))
            self._count += 1

    def rows(self) -> list[Agreement]:
        """Return the agreement of each budget and kind that has answers."""
        return [row for row, _ in self._rows(since=0)]

    def _rows(self, since: int) -> list[tuple[Agreement, int]]:
        """Return the agreement of the answers from a number on, with their weights."""
        with self._lock:
            windows = {key: [*answers] for key, answers in sorted(self._answers.items())}
        rows = []
        for key, answers in windows.items():
            if newest := [answer for answer in answers if answer[0] >= since]:
                _, tokens, agreed, weights = zip(*newest, strict=True)
                share, bound = sum(agreed) / sum(tokens), lower_bound(tokens, agreed)
                row = Agreement(len(tokens), sum(tokens), share, bound, *key)
                rows.append((row, sum(weights)))
        return rows

    def total(self) -> Agreement | None:
        """Return the agreement of the newest answers of all traffic; ``None`` before the first."""
        rows = self._rows(self._count - self._size)
        return joined(rows) if rows else None


def joined(rows: Sequence[tuple[Agreement, float]]) -> Agreement:
    """Return the agreement of all rows together, each with its weight in the traffic."""
    total = sum(weight for _, weight in rows)
    share = sum(row.agreement * weight for row, weight in rows) / total
    below = math.hypot(*((row.agreement - row.bound) * weight / total for row, weight in rows))
    answers, tokens = (sum(getattr(row, n) for row, _ in rows) for n in ("answers", "tokens"))
    return Agreement(answers, tokens, share, max(0.0, share - below))


FACTORS = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125)
"""Budgets of new requests, by level, as multiples of the engine's, for which there are slots."""
_RECENT, _FEW, _PATIENCE = 16, 6, 48


class BudgetLevels:
    """Chooses the level of new requests, for each kind apart, so that agreement stays above a goal.

    A kind starts with the engine's budget. The budget goes up one level as soon as the newest
    `_RECENT` answers of the present one (at least `_FEW`) agree less than the goal, and down one
    when the bound of all answers at the present one is above it. A level that has failed is tried
    again after `_PATIENCE` answers, and after twice as many each time it fails again.
    """

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self._levels: dict[str, int] = defaultdict(int)
        self._answers: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._seen: dict[str, int] = defaultdict(int)
        self._failures: dict[tuple[str, int], tuple[int, int]] = {}  # times, and when to try again
        # Kinds for which the largest budget is too small; replaced, as other threads read it.
        self.missed: frozenset[str] = frozenset()

    def level(self, kind: str) -> int:
        """Return the level of new requests of a kind."""
        return self._levels.get(kind, 0)

    def add(self, kind: str, level: int, tokens: int, agreed: int) -> None:
        """Note an answer of a level; mutates the level of new requests."""
        self._seen[kind] += 1
        if level != self.level(kind):
            return
        answers = self._answers[kind]
        answers.append((tokens, agreed))
        del answers[:-WINDOW]
        newest = answers[-_RECENT:]
        share = sum(a for _, a in newest) / sum(n for n, _ in newest)
        if len(newest) >= _FEW and share < self.goal:
            if level == 0:
                self.missed |= {kind}
                return
            times = self._failures.get((kind, level), (0, 0))[0] + 1
            again = self._seen[kind] + _PATIENCE * 2 ** (times - 1)
            self._failures[kind, level] = times, again
            self._move(kind, level - 1)
            return
        if lower_bound(*zip(*answers, strict=True)) < self.goal:
            return
        self.missed -= {kind}
        again = self._failures.get((kind, level + 1), (0, 0))[1]
        if level + 1 < len(FACTORS) and self._seen[kind] >= again:
            self._move(kind, level + 1)

    def _move(self, kind: str, level: int) -> None:
        self._levels[kind] = level
        self._answers[kind] = []
