"""StreamingLLM: attention sinks and recent tokens (arXiv 2309.17453)."""

from __future__ import annotations

from h2okv.budget import TokenBudget
from h2okv.policy.rule import Rule
from h2okv.policy.scoring import Inputs


class StreamingLLM(Rule):
    """Keeps the first tokens and the newest ones (StreamingLLM, arXiv 2309.17453, section 3)."""

    name = "sink_recent"
    inputs = Inputs.NOTHING
    default_sink = 4  # the paper's choice

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        sink = min(budget.sink or self.default_sink, budget.total - 1)
        return TokenBudget(sink=sink, heavy=0, recent=budget.total - sink)
