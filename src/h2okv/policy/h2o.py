"""H2O, each of its two parts alone, and the full cache."""

from __future__ import annotations

from h2okv.config import TokenBudget
from h2okv.policy.base import Policy


class FullPolicy(Policy):
    """Keeps every token: the baseline, with H2O's scores beside it."""

    name = "full"
    evicts = False


class H2OPolicy(Policy):
    """Keeps the recent window and the highest accumulated attention (arXiv 2306.14048, Alg. 1)."""

    name = "h2o"


class HeavyPolicy(H2OPolicy):
    """Heavy hitters alone, without a recent window (arXiv 2306.14048, Table 9)."""

    name = "heavy"

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Gives the recent window's part to the heavy hitters."""
        return TokenBudget(sink=budget.sink, heavy=budget.heavy + budget.recent, recent=0)


class RecentPolicy(Policy):
    """Keeps the newest tokens; "Local" in the H2O paper (arXiv 2306.14048, section 5)."""

    name = "recent"
    uses_scores = False

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Gives the whole budget to the recent window."""
        return TokenBudget(sink=0, heavy=0, recent=budget.total)


class SinkRecentPolicy(RecentPolicy):
    """Keeps the first tokens and the newest ones (StreamingLLM, arXiv 2309.17453, section 3)."""

    name = "sink_recent"
    default_sink = 4
    """Sinks kept when the user gives no number; the StreamingLLM paper's choice."""

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Gives what the sinks leave to the recent window, which keeps at least one token."""
        sink = min(budget.sink or self.default_sink, budget.total - 1)
        return TokenBudget(sink=sink, heavy=0, recent=budget.total - sink)
