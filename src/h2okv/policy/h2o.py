"""H2O, its heavy hitters alone, and the entries that a cache which knew the query would keep."""

from __future__ import annotations

from h2okv.config import TokenBudget
from h2okv.policy.base import Policy


class H2OPolicy(Policy):
    """Keeps the recent window and the highest accumulated attention (arXiv 2306.14048, Alg. 1)."""

    name = "h2o"


class HeavyPolicy(H2OPolicy):
    """Heavy hitters alone, without a recent window (arXiv 2306.14048, Table 9)."""

    name = "heavy"

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, budget.heavy + budget.recent, recent=0)


class TopKPolicy(Policy):
    """Shows each query the entries that it attends to most (arXiv 2306.14048, Table 8, "TopK").

    It needs all of the cache at every step and saves no memory: only with ``simulate=True``. Every
    query head chooses for itself, by its attention over the full cache. As in the frame, a block's
    own tokens are always seen, so that ``prefill_chunk=1`` is the paper's protocol.
    """

    name = "topk"
    evicts = False
    uses_scores = False
    per_query = True

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, heavy=0, recent=0, num_static=budget.heavy + budget.recent)


class TopKHeavyPolicy(TopKPolicy):
    """The same, with heavy hitters (arXiv 2306.14048, Table 8, "TopK w. H2").

    The paper does not say how the two are put together. Here the heavy part is for the entries
    with the highest accumulated attention before the block, and of the others each query chooses
    as many as the recent part, as heavy hitters and window divide the budget in H2O.
    """

    name = "topk_heavy"
    uses_scores = True

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, budget.heavy, recent=0, num_static=budget.recent)
