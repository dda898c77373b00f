"""A policy that knows the whole text: H2O with the statistics of the future."""

from __future__ import annotations

import numpy as np
import torch

from h2okv.policy import Policy


class GlobalPolicy(Policy):
    """Ranks entries by the attention that they receive in the whole text, future included.

    It is H2O with global in place of local statistics (arXiv 2306.14048, section 3.3), and can
    only be used on a text that is known to its end.

    Args:
        scores: float ``[L, H, T]``, attention received from all queries.
        layers: the layers of the array, in order.
    """

    name = "global"

    def __init__(self, scores: np.ndarray, layers: tuple[int, ...]) -> None:
        self._scores = {
            layer_idx: torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))
            for layer_idx, part in zip(layers, scores, strict=True)
        }

    def priority(
        self,
        scores: torch.Tensor,
        positions: torch.Tensor,
        newest: torch.Tensor,
        layer_idx: int,
    ) -> torch.Tensor:
        """The attention received from the whole text, whatever has been received so far."""
        table = self._scores[layer_idx].to(positions.device)
        self._scores[layer_idx] = table
        places = positions.clamp(min=0).to(torch.int64)
        return table.expand(positions.shape[0], -1, -1).gather(-1, places)
