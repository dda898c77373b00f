"""Recency alone: a sliding window, with or without attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from h2okv.config import TokenBudget
from h2okv.policy.base import Policy


class RecentPolicy(Policy):
    """Keeps the newest tokens; "Local" in the H2O paper (arXiv 2306.14048, section 5)."""

    name = "recent"
    uses_scores = False

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Gives the whole budget to the recent window."""
        return TokenBudget(sink=0, heavy=0, recent=budget.total)

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        """Equal for all entries, so that the frame's rule decides: the older goes first."""
        return torch.zeros_like(scores)


class SinkRecentPolicy(RecentPolicy):
    """Keeps the first tokens and the newest ones (StreamingLLM, arXiv 2309.17453, section 3)."""

    name = "sink_recent"
    default_sink = 4
    """Sinks kept when the user gives no number; the StreamingLLM paper's choice."""

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Gives what the sinks leave to the recent window, which keeps at least one token."""
        sink = min(budget.sink or self.default_sink, budget.total - 1)
        return TokenBudget(sink=sink, heavy=0, recent=budget.total - sink)
