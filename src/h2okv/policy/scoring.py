"""What the attention that an entry receives counts for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from h2okv.records import unknown_name

SCORINGS = ("sum", "mean", "decay", "last", "value_norm", "expected")
# Half of what a query gave is forgotten after 138 further ones.
DEFAULT_DECAY = 0.995
# Of ``last``: what earlier queries gave decides where the newest gave nothing at all.
_FORGOTTEN = 1e-30


@dataclass(frozen=True)
class Scoring:
    """How an entry's attention becomes its score; made by `get_scoring`.

    With ``P[i, j]`` the probability that query i gives entry j, added up over the query heads of
    the KV head's group, and n the newest query, entry j has the score

    - ``sum``: ``sum_i P[i, j]`` (H2O, arXiv 2306.14048, Algorithm 1);
    - ``mean``: ``sum_i P[i, j] / (number of queries i that could attend to j)``, which takes away
      the head start of old entries (tried and found worse in H2O, appendix B.2; kvpress does it);
    - ``decay``: ``sum_i decay ** (n - i) P[i, j]`` (A2SF, arXiv 2407.20485, section 3);
    - ``last``: ``P[n, j]``, what the newest query gives (TOVA, arXiv 2401.06104, section 3.2; with
      ``policy="heavy"`` it is TOVA, but that each KV head chooses for itself);
    - ``value_norm``: ``sum_i P[i, j] * (L1 norm of value j)`` (VATP, arXiv 2406.12335, section 3).
      The paper keeps the first tokens besides, whose values are small: ``sink=20`` in its H2O
      runs. With a decay, the sum of ``decay`` in the place of the plain one;
    - ``expected``: what a block's own queries would give if they were asked again from behind its
      end, all of them seeing all entries: ``sqrt(sum_i P'[i, j]**2) * (L1 norm of value j)``. What
      an entry has received depends on how many queries came after it, and how soon; this does not.
      A single token adds ``P[i, j]``, as with ``value_norm``. Its kin are Expected Attention
      (arXiv 2510.00636), which makes a Gaussian of the queries, and KVzip (arXiv 2505.23416),
      which has the model read the text twice.
    """

    name: str = "sum"  # one of `SCORINGS`
    decay: float | None = None  # the factor per query, in (0, 1]

    @property
    def is_sum(self) -> bool:
        return self.name == "sum"

    @property
    def is_incremental(self) -> bool:
        """Whether the accumulated numbers are the scores, as they stand."""
        return self.name in ("sum", "decay", "last")

    @property
    def factor(self) -> float | None:
        """What a query counts for with each later one; ``None``: as much as they do."""
        return _FORGOTTEN if self.name == "last" else self.decay

    @property
    def uses_values(self) -> bool:
        return self.name in ("value_norm", "expected")

    @property
    def looks_ahead(self) -> bool:
        """Whether a block's queries are asked again from behind its end."""
        return self.name == "expected"

    def query_weights(self, later: Tensor) -> Tensor | None:
        """What each query counts for after so many ``later`` real ones, ``[B, T]``; else one."""
        return None if self.factor is None else power(self.factor, later)

    def eviction_scores(
        self, scores: Tensor, positions: Tensor, newest: Tensor, norms: Tensor | None
    ) -> Tensor:
        """Turns what has been accumulated, fp32 ``[B, H, N]``, into the scores that a policy sees.

        Meaningless where a position is -1. ``newest`` is int64 ``[B, 1, 1]``.
        """
        if self.name == "mean":
            # What is held has been seen by its own query and by every one since, whatever the
            # blocks; positions do not count padding, so neither does the difference.
            return scores / (newest.to(positions.dtype) - positions + 1)
        if self.uses_values:
            assert norms is not None
            return scores * norms
        return scores


def get_scoring(name: str, decay: float | None = None) -> Scoring:
    """Makes a scoring from what a user gives; refuses a decay that is out of range or of no use."""
    if name not in SCORINGS:
        raise unknown_name("scoring", name, SCORINGS)
    if decay is None:
        return Scoring(name, DEFAULT_DECAY if name == "decay" else None)
    if name not in ("decay", "value_norm"):
        raise ValueError(
            f"decay={decay!r} has no effect with scoring={name!r}; add scoring='decay' or "
            "'value_norm', or leave it out."
        )
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise ValueError(
            f"decay={decay!r} is out of range; give a factor above 0 and up to 1 such as "
            f"{DEFAULT_DECAY}."
        )
    return Scoring(name, float(decay))


def power(decay: float, exponent: Tensor) -> Tensor:
    """``decay ** exponent`` in fp32; never 0, which would make infinite scores (pins) no number."""
    power = torch.exp(exponent.to(torch.float32) * math.log(decay))
    return power.clamp_(min=torch.finfo(torch.float32).tiny)
