"""SnapKV: the entries that the end of the prompt attends to (arXiv 2404.14469)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from h2okv.budget import TokenBudget
from h2okv.policy.rule import Rule
from h2okv.policy.scoring import Inputs


class SnapKV(Rule):
    """Keeps the entries that the prompt's last queries attend to (arXiv 2404.14469, section 4).

    The attention of the observation window, the last ``recent`` queries of the prompt, is summed
    for each entry before it and averaged over neighbouring positions; the ``heavy`` highest stay,
    with the window. That is done once: every token after the prompt is kept.

    Unlike the published code, the query heads of a KV head's group choose together (the code
    repeats keys and values for each query head), and padding never counts. ``kernel`` is the odd
    number of positions averaged over; 1 for none.
    """

    name = "snapkv"
    inputs = Inputs.WINDOW

    def __init__(self, kernel: int = 5) -> None:
        if isinstance(kernel, bool) or not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd int of 1 or more, got {kernel!r}.")
        self.kernel = kernel

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        recent = max(budget.recent, 1)  # one query at least
        return TokenBudget(budget.sink, budget.heavy + budget.recent - recent, recent)

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        order = positions.argsort(dim=-1, stable=True)
        in_order = scores.masked_fill(positions < 0, 0.0).gather(-1, order)
        pooled = avg_pool1d(in_order, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.empty_like(scores).scatter_(-1, order, pooled)
