"""H2O, and its heavy hitters alone."""

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
        """Gives the recent window's part to the heavy hitters."""
        return TokenBudget(sink=budget.sink, heavy=budget.heavy + budget.recent, recent=0)
