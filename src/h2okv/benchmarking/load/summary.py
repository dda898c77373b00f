"""Many outcomes in a few numbers."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from h2okv.benchmarking.load.outcome import INTERRUPTED, Outcome

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Percentiles:
    """Three points of a distribution, in seconds; between two values in proportion.

    Attributes:
        p50: The median.
        p95: 95 % are at most this.
        p99: 99 % are at most this.
    """

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles | None:
        """Takes the percentiles of the values that are there; ``None`` if none is."""
        there = [value for value in values if value is not None]
        if not there:
            return None
        return cls(*(float(value) for value in numpy.quantile(there, list(SHARES.values()))))


@dataclass(frozen=True)
class Summary:
    """What a load gave. Rates and times are of the requests that were answered in full.

    Attributes:
        requests: How many were sent.
        finished: Of these, answered in full.
        failed: Of these, not.
        interrupted: Of these, under way when the measurement was stopped; not among the failed.
        errors: Kinds of errors, and how many of each.
        messages: For each kind, what was said the first time.
        seconds: From the first request to the end of the last one.
        requests_per_second: Finished ones.
        new_tokens_per_second: Their new tokens.
        total_tokens_per_second: These, and the tokens of their prompts; ``None`` if not told.
        prompt_tokens: Mean tokens of their prompts; ``None`` if not told.
        new_tokens: Mean new tokens.
        counted_by: Where the number of new tokens is from: ``"usage"`` (the server), ``"pieces"``
            (one for each piece of a stream) or ``"both"``.
        first_token: Seconds to the first text.
        per_token: Seconds for each further token of a request.
        gap: Seconds between two pieces of any request.
        lateness: Seconds by which requests were sent too late; of this program, not the server.
    """

    requests: int
    finished: int
    failed: int
    interrupted: int
    errors: dict[str, int]
    messages: dict[str, str]
    seconds: float
    requests_per_second: float
    new_tokens_per_second: float
    total_tokens_per_second: float | None
    prompt_tokens: float | None
    new_tokens: float | None
    counted_by: str
    first_token: Percentiles | None
    per_token: Percentiles | None
    gap: Percentiles | None
    lateness: Percentiles | None

    def cells(self) -> dict[str, Any]:
        """Returns the values of a CSV row, by the names of `SUMMARY_COLUMNS`."""
        cells = asdict(self)
        cells["errors"] = json.dumps(self.errors)
        del cells["messages"]
        for name in _TIMES:
            point: dict[str, float] = cells.pop(name) or {}
            cells |= {f"{name}_{share}": point.get(share) for share in SHARES}
        return cells


_TIMES = ("first_token", "per_token", "gap", "lateness")
SUMMARY_COLUMNS = (
    "requests", "finished", "failed", "interrupted", "errors", "seconds", "requests_per_second",
    "new_tokens_per_second", "total_tokens_per_second", "prompt_tokens", "new_tokens", "counted_by",
    *(f"{name}_{share}" for name in _TIMES for share in SHARES),
)  # fmt: skip
"""The names of what `Summary.cells` tells."""


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Sums outcomes up.

    Args:
        outcomes: Of one load.

    Returns:
        The summary.
    """
    good = [own for own in outcomes if own.error is None]
    bad = [own for own in outcomes if own.error not in (None, INTERRUPTED)]
    ends = [own.ended for own in outcomes]
    seconds = max(ends) - min(own.due for own in outcomes) if outcomes else 0.0
    new = sum(own.tokens for own in good)
    prompts = [own.prompt_tokens for own in good if own.prompt_tokens is not None]
    knows_prompts = bool(good) and len(prompts) == len(good)
    messages: dict[str, str] = {}
    for own in bad:
        messages.setdefault(str(own.error), own.message)

    def rate(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    return Summary(
        requests=len(outcomes),
        finished=len(good),
        failed=len(bad),
        interrupted=len(outcomes) - len(good) - len(bad),
        errors=dict(Counter(str(own.error) for own in bad).most_common()),
        messages=messages,
        seconds=seconds,
        requests_per_second=rate(len(good)),
        new_tokens_per_second=rate(new),
        total_tokens_per_second=rate(new + sum(prompts)) if knows_prompts else None,
        prompt_tokens=statistics.mean(prompts) if knows_prompts else None,
        new_tokens=new / len(good) if good else None,
        counted_by=_counted_by(good),
        first_token=Percentiles.of(own.first_token for own in good),
        per_token=Percentiles.of(own.per_token for own in good),
        gap=Percentiles.of(gap for own in good for gap in own.gaps),
        lateness=Percentiles.of(own.lateness for own in outcomes),
    )


def _counted_by(outcomes: Sequence[Outcome]) -> str:
    told = sum(own.new_tokens is not None for own in outcomes)
    if told == len(outcomes):
        return "usage" if outcomes else ""
    return "both" if told else "pieces"
