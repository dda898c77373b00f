"""H2O: recent tokens and heavy hitters (arXiv 2306.14048)."""

from __future__ import annotations

from h2okv.budget import TokenBudget
from h2okv.policy.rule import Rule


class H2O(Rule):
    """Keeps the recent window and the highest accumulated attention (arXiv 2306.14048, Alg. 1)."""

    name = "h2o"


class Heavy(H2O):
    """Keeps heavy hitters alone, without a recent window (arXiv 2306.14048, Table 9)."""

    name = "heavy"

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, budget.heavy + budget.recent, recent=0)
