"""Expected attention: a block's queries re-evaluated behind its end."""

from __future__ import annotations

from torch import Tensor

from h2okv.policy.scoring import BlockView, Inputs, Scoring


class Expected(Scoring):
    """``sqrt(sum_i P'[i, j] ** 2) * (L1 norm of value j)``, P' of queries behind the block's end.

    Every query of each query head sees all entries there, whichever came first; with
    ``evict_every`` the mean of up to four query heads does, of which fewer are stored until a cut.
    The attention that an entry has received depends on the number of queries that came after it,
    and how soon; this does not. A single token adds ``P[i, j]``, as in `ValueNorm`. Related:
    Expected Attention (arXiv 2510.00636) models the queries by a Gaussian, KVzip (arXiv 2505.23416)
    has the model read the text twice.
    """

    name = "expected"
    inputs = Inputs.QUERIES
    weighs_norms = True

    def score_block(self, block: BlockView) -> Tensor:
        return block.attend_from_behind()
