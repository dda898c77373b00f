"""A trace in the few bytes that a browser can hold for thousands of tokens and all heads."""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np

from h2okv.analysis.trace import Trace
from h2okv.budget import TokenBudget

RECORDED = 48
"""Steps whose scores are sent; the page draws a line between two of them."""
LOWEST_SCORE = 0.01
"""A score at or below this is sent as 0 (no attention worth a colour)."""
_LEVELS = 254


def pack_trace(
    trace: Trace, policy: str, budget: TokenBudget, next_pieces: tuple[str, ...], highest: float
) -> dict[str, Any]:
    """Packs a trace for the page.

    Args:
        trace: with recorded scores.
        policy: what it is called.
        budget: its parts as the policy divides them.
        next_pieces: the likeliest next token after each step, as text.
        highest: the score that gets the top level.

    Returns:
        A JSON object. ``gone`` is uint16 ``[L, H, T]`` and each of ``scores`` (one for a layer)
        uint8 ``[C][H][step + 1]``, both as gzip in base64; ``bytes`` lists ``[step, bytes]``
        where what the cache takes changes.
    """
    layers = trace.gone_at.shape[0]
    return {
        "policy": policy,
        "sink": budget.sink,
        "heavy": budget.heavy,
        "recent": budget.recent,
        "first": trace.first,
        "steps": trace.recorded.tolist(),
        "gone": _blob(trace.gone_at.astype("<u2")),
        "scores": [
            _blob(np.concatenate([quantise(part[i], highest).ravel() for part in trace.scores]))
            for i in range(layers)
        ],
        "bytes": _changes(trace.held_bytes),
        "next": list(next_pieces),
        "losses": [None if np.isnan(x) else round(float(x), 3) for x in trace.losses],
    }


def quantise(scores: np.ndarray, highest: float) -> np.ndarray:
    """Turns scores into 255 levels, even in their logarithm.

    Args:
        scores: float, any shape, not negative.
        highest: the score of the top level.

    Returns:
        uint8 of the same shape: 0 for `LOWEST_SCORE` or less, else 1 to 255.
    """
    span = np.log(highest / LOWEST_SCORE)
    place = np.log(np.maximum(scores, LOWEST_SCORE) / LOWEST_SCORE) / span
    levels = 1 + np.rint(_LEVELS * np.clip(place, 0, 1))
    return np.where(scores > LOWEST_SCORE, levels, 0).astype(np.uint8)


def _blob(array: np.ndarray) -> str:
    # Without a time stamp, so that the same trace gives the same file.
    return base64.b64encode(gzip.compress(array.tobytes(), 6, mtime=0)).decode("ascii")


def _changes(values: np.ndarray) -> list[list[int]]:
    found: list[list[int]] = []
    for step, value in enumerate(values.tolist()):
        if value and (not found or found[-1][1] != value):
            found.append([step, value])
    return found
