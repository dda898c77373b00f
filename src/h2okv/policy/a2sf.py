"""A2SF: older attention counts for less (arXiv 2407.20485)."""

from __future__ import annotations

from h2okv.policy.scoring import Scoring


class Decay(Scoring):
    """``sum_i decay ** (n - i) P[i, j]``, n the newest query (arXiv 2407.20485, section 3)."""

    name = "decay"
    default_decay = 0.995  # half of a query's attention is forgotten after 138 further ones
    takes_decay = True
