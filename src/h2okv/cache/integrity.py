"""What must hold between any two forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from h2okv.cache.rolling import ranks_of
from h2okv.ops.selection import protected_entries

if TYPE_CHECKING:
    from h2okv.cache.scored import ScoredLayer


def check_integrity(layer: ScoredLayer) -> None:
    """Checks a layer that holds entries against the contract.

    Args:
        layer: the layer; unchanged.

    Raises:
        ValueError: naming what is broken.
    """
    layer.require_attention()
    positions, scores = layer.positions, layer.scores
    taken = positions >= 0
    newest = layer.num_real_tokens.view(-1, 1, 1) - 1
    counts = taken.sum(dim=-1, keepdim=True)
    expected = newest + 1
    if layer.policy.evicts:
        expected = torch.minimum(expected, layer.total)
    ordered = positions.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    protected = protected_entries(positions, newest, layer.sink, layer.recent) & taken
    due = torch.minimum(newest + 1, layer.sink + layer.recent)
    ranks = getattr(layer, "ranks", None)
    misplaced = torch.zeros_like(taken)
    if ranks is not None:
        misplaced = taken & (ranks != ranks_of(positions))
    problems = {
        "holds another number of entries than the budget": counts != expected,
        "holds a token twice": twice,
        "holds a token that it has not seen": positions > newest,
        "lost a sink or a recent token": protected.sum(dim=-1, keepdim=True) < due,
        "holds an entry at another place than its rank": misplaced,
        "has a score that is negative or not finite": taken & ~(scores.isfinite() & (scores >= 0)),
    }
    for problem, found in problems.items():
        if bool(found.any()):
            raise ValueError(f"layer {layer.layer_idx} {problem}; call cache.reset().")
