"""KeyDiff: which keys differ most from the others."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from h2okv.policy.base import Policy


class KeyDiffPolicy(Policy):
    """Keeps the keys that point elsewhere than their mean (KeyDiff, arXiv 2504.15364, section 3).

    A key's rank is minus its cosine to the mean of the directions of all keys held. No attention is
    looked at, so that a prompt is read by fused attention alone. The paper has no recent part; give
    ``recent=0`` for that. Keys are taken as they are held: rotated to their places in the text. Two
    keys differ equally from their mean, so that the older goes.
    """

    name = "keydiff"
    uses_scores = False
    uses_keys = True

    def key_priority(self, keys: Tensor, positions: Tensor) -> Tensor:
        directions = normalize(keys.float(), dim=-1)
        taken = (positions >= 0).unsqueeze(-1)
        mean = (directions * taken).sum(dim=2, keepdim=True)
        ranks = -(directions * normalize(mean, dim=-1)).sum(dim=-1)
        # Of two keys, rounding would decide what is a tie.
        is_tie = taken.sum(dim=2) <= 2
        return ranks.masked_fill(is_tie, 0.0)
