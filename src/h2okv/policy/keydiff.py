"""KeyDiff: the keys that differ most from the others (arXiv 2504.15364)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from h2okv.policy.rule import Rule
from h2okv.policy.scoring import Inputs


class KeyDiff(Rule):
    """Keeps the keys that point away from their mean (KeyDiff, arXiv 2504.15364, section 3).

    A key's rank is minus its cosine to the mean of the directions of all cached keys. It needs no
    attention, so a prompt is read by fused attention alone. The paper has no recent part; give
    ``recent=0`` for that. Keys are taken as they are cached: rotated to
    their positions in the text. Two keys differ equally from their mean: the older is evicted.
    """

    name = "keydiff"
    inputs = Inputs.KEYS

    def key_priority(self, keys: Tensor, positions: Tensor) -> Tensor:
        directions = normalize(keys.float(), dim=-1)
        is_entry = (positions >= 0).unsqueeze(-1)
        mean = (directions * is_entry).sum(dim=2, keepdim=True)
        ranks = -(directions * normalize(mean, dim=-1)).sum(dim=-1)
        # Rounding would decide the tie of two keys.
        return ranks.masked_fill(is_entry.sum(dim=2) <= 2, 0.0)
