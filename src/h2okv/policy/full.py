"""The full cache."""

from __future__ import annotations

import torch
from torch import Tensor

from h2okv.policy.base import Policy


class FullPolicy(Policy):
    """Keeps every token: the baseline, with H2O's scores beside it."""

    name = "full"
    evicts = False

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        """Equal for all entries; never asked for, since nothing is evicted."""
        return torch.zeros_like(scores)
