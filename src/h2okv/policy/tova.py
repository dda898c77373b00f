"""TOVA: the attention of the newest query (arXiv 2401.06104)."""

from __future__ import annotations

from h2okv.policy.scoring import Scoring

# Earlier queries decide where the newest gives an entry nothing at all.
_FORGOTTEN = 1e-30


class Last(Scoring):
    """``P[n, j]``, the attention of the newest query n (TOVA, arXiv 2401.06104, section 3.2).

    With ``policy="heavy"`` it is TOVA, except that each KV head chooses for itself.
    """

    name = "last"

    @property
    def factor(self) -> float:
        return _FORGOTTEN
