"""The theorem at full length, for the objective whose best set needs no search."""

from __future__ import annotations

import numpy as np
import torch

from h2okv.analysis.observing import LayerAttention, read_observed
from h2okv.analysis.rows import Tick, no_tick
from h2okv.analysis.study import DEFAULT_BUDGET, Study
from h2okv.analysis.tables import Row

POLICIES = ("heavy", "h2o", "global")
_STEPS = 8


class Worth:
    """Compares what policies hold with the best set, by full attention's accumulated score.

    With h the identity a set's worth is the sum of its tokens' scores, so the best set is that of
    the highest ones, however long the text is.

    Args:
        gone_at: for each policy int ``[L, H, T]``, the first query that does not see a token.
        layers: the layers of these arrays, in order.
        kept: tokens in a set.
        steps: the newest tokens at which to compare, ascending.
    """

    def __init__(
        self,
        gone_at: dict[str, np.ndarray],
        layers: tuple[int, ...],
        kept: int,
        steps: list[int],
    ) -> None:
        self._gone = {name: torch.from_numpy(gone) for name, gone in gone_at.items()}
        self._layers, self._kept, self._steps = layers, kept, steps
        self.ratios: list[Row] = []

    def see_layer(self, layer: LayerAttention) -> None:
        """Takes one layer's attention; mutates `ratios`."""
        place = self._layers.index(layer.layer_idx)
        total = torch.zeros(layer.key.shape[0], layer.key.shape[1], dtype=torch.float64)
        for first, probabilities in layer.rows():
            received = probabilities.sum(dim=1).double().cpu()
            last = received.shape[-1]
            for step in self._steps:
                if first <= step < last:
                    rows = received[:, : step - first + 1].sum(dim=1)
                    self._compare(place, step, (total[:, :last] + rows)[:, : step + 1])
            total[:, :last] += received.sum(dim=1)

    def _compare(self, place: int, step: int, scores: torch.Tensor) -> None:
        best = scores.topk(self._kept, dim=-1).values.sum(dim=-1)
        for policy, gone in self._gone.items():
            held = gone[place, :, : step + 1] > step + 1
            ratio = (scores * held).sum(dim=-1) / best
            self.ratios += [
                {
                    "policy": policy,
                    "layer": self._layers[place],
                    "head": head,
                    "step": step,
                    "ratio": value,
                }
                for head, value in enumerate(ratio.tolist())
            ]


def measure_long(study: Study, tick: Tick = no_tick) -> dict[str, list[Row]]:
    """Compares greedy eviction with the best sets on the whole text, at a 20 % budget.

    Args:
        study: the model and the text.
        tick: told the share that is done.

    Returns:
        The table ``theory_long``.
    """
    gone = {
        policy: study.gone_at(policy, DEFAULT_BUDGET, tick if policy == "heavy" else no_tick)
        for policy in POLICIES
    }
    kept = study.tokens(DEFAULT_BUDGET)
    steps = np.linspace(kept, study.length - 1, _STEPS).round().astype(int).tolist()
    worth = Worth(gone, study.layers, kept, steps)
    read_observed(study.model, study.sample.input_ids, worth.see_layer)
    return {"theory_long": worth.ratios}
