"""The strided pattern of the Sparse Transformer, with and without heavy hitters."""

from __future__ import annotations

import torch
from torch import Tensor

from h2okv.config import TokenBudget
from h2okv.policy.base import Policy


class StridedPolicy(Policy):
    """Keeps a recent window and every l-th position (Sparse Transformer, arXiv 1904.10509, 4.2).

    One of the baselines of the H2O paper (arXiv 2306.14048, Table 2). There a query sees the
    positions whose distance to it is a multiple of the stride; with eviction a later query cannot
    see what an earlier one had no use for, so here the positions themselves are the multiples. The
    stride is the smallest power of two whose multiples fit into their part of the budget: it
    doubles as the text grows, and every second of the multiples goes.

    The budget is divided in halves, one for the window and one for the multiples. What the
    multiples leave of theirs goes to the window.
    """

    name = "strided"
    uses_scores = False

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Halves the heavy and the recent share together."""
        share = budget.heavy + budget.recent
        return TokenBudget(budget.sink, heavy=0, recent=share - share // 2, num_static=share // 2)

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        """Equal for all entries, so that the frame's rule decides: the older goes first."""
        return torch.zeros_like(scores)

    def static_mask(self, positions: Tensor, newest: Tensor, limit: Tensor) -> Tensor:
        """Marks the multiples of the stride."""
        stride = power_of_two_from(newest // limit.clamp(min=1) + 1)
        return (positions % stride.to(positions.dtype) == 0) & (limit > 0)


class StridedHeavyPolicy(StridedPolicy):
    """The strided pattern with heavy hitters (arXiv 2306.14048, Table 2, "strided w. H2").

    The heavy share is for the highest accumulated attention, the recent share for the pattern, half
    of it for the window and half for the multiples, whose rest goes to the heavy hitters.
    """

    name = "strided_heavy"
    uses_scores = True

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Halves the recent share."""
        share = budget.recent
        return TokenBudget(
            budget.sink, budget.heavy, recent=share - share // 2, num_static=share // 2
        )

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        """The accumulated attention."""
        return scores


def power_of_two_from(numbers: Tensor) -> Tensor:
    """The smallest powers of two that are not below the given numbers.

    Args:
        numbers: int64, 1 or more, below 2 ** 32.

    Returns:
        int64, the same shape.
    """
    filled = numbers - 1
    for shift in (1, 2, 4, 8, 16):
        filled = filled | (filled >> shift)
    return filled + 1
