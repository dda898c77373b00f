"""VATP: attention times the size of the value (arXiv 2406.12335)."""

from __future__ import annotations

from h2okv.policy.scoring import Scoring


class ValueNorm(Scoring):
    """``sum_i P[i, j] * (L1 norm of value j)`` (VATP, arXiv 2406.12335, section 3).

    The paper keeps the first tokens besides, whose values are small: ``sink=20`` in its H2O runs.
    With a decay, `Decay`'s sum takes the place of the plain one.
    """

    name = "value_norm"
    takes_decay = weighs_norms = True
