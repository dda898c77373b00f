"""What a kept set is worth: the paper's objective, read in three ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CONCAVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda z: z,
    "sqrt": np.sqrt,
    "log": np.log1p,
}
"""Functions h: growing, concave, 0 at 0."""

OBJECTIVES = ("tokens", "total", "rows")
"""What h is applied to: each token's accumulated attention, their sum, or each row's kept mass."""


def set_values(
    rows: np.ndarray, members: np.ndarray, step: int, objective: str, h: str
) -> np.ndarray:
    """Computes the worth of sets after a step.

    With o[s] the attention that token s has received from the queries up to the step:
    ``tokens`` is the sum over s of h(o[s]) (additive); ``total`` is h(sum over s of o[s]);
    ``rows`` is the sum over queries of h(the query's attention on the set). The last one knows
    that a token is worth little where others have covered a query already.

    Args:
        rows: attention ``[G, n, n]``, rows of full attention; 0 after the diagonal.
        members: bool ``[S, n]``, one set in each row.
        step: the newest token, from 0.
        objective: one of `OBJECTIVES`.
        h: one of `CONCAVE`.

    Returns:
        float64 ``[S]``.
    """
    concave = CONCAVE[h]
    seen = rows[:, : step + 1]
    sets = members.astype(np.float64)
    if objective == "rows":
        covered = np.einsum("gqs,ms->mgq", seen, sets, optimize=True)
        return concave(covered).sum(axis=(1, 2))
    received = seen.sum(axis=(0, 1))
    if objective == "total":
        return concave(sets @ received)
    return sets @ concave(received)
