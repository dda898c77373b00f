"""Top-k: the entries that each query attends to most (arXiv 2306.14048, Table 8)."""

from __future__ import annotations

from h2okv.config import TokenBudget
from h2okv.policy.rule import Rule
from h2okv.policy.scoring import Sees


class TopK(Rule):
    """Shows each query the entries that it attends to most (arXiv 2306.14048, Table 8, "TopK").

    It needs all of the cache at every step and saves no memory: only with ``simulate=True``. Every
    query head chooses for itself, by its attention over the full cache. As in the frame, a block's
    own tokens are always seen, so ``evict_every=1`` is the paper's protocol.
    """

    name = "topk"
    sees = Sees.EACH_QUERY
    evicts = False
    uses_scores = False

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, heavy=0, recent=0, num_static=budget.heavy + budget.recent)


class TopKHeavy(TopK):
    """The same with heavy hitters (arXiv 2306.14048, Table 8, "TopK w. H2").

    The paper does not say how the two are put together. Here the heavy part is for the entries
    with the highest accumulated attention before the block, and of the others each query chooses
    as many as the recent part, as heavy hitters and window divide the budget in H2O.
    """

    name = "topk_heavy"
    uses_scores = True

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, budget.heavy, recent=0, num_static=budget.recent)
