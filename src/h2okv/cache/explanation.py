"""Why an entry stays or goes, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2okv.budget import TokenBudget


@dataclass(frozen=True)
class Explanation:
    """Where a token stands in one head of one layer, by the scores of now."""

    position: int
    """Position of the token in its sequence, padding not counted."""
    is_cached: bool
    """Whether the head still caches it."""
    protected_by: str | None = None
    """``"sink"``, ``"recent"``, ``"pinned"``, or ``"pattern"`` of a policy that keeps places; of an
    entry that a cut now does not evict."""
    score: float | None = None
    """What the policy ranks: the attention received, as ``scoring`` counts it."""
    rank: int | None = None
    """Place among the entries that are not protected; 1 leaves first. Of equals the older does."""
    num_ranked: int = 0
    """Number of these entries."""
    threshold: float | None = None
    """Lowest score that would stay at a cut now; ``None`` if nothing would leave."""
    left_at: int | None = None
    """Tokens of the sequence that were read when it left, if evictions are recorded."""

    def __str__(self) -> str:
        token = f"token {self.position}"
        if not self.is_cached:
            when = "" if self.left_at is None else f" when {self.left_at} tokens had been read"
            return f"{token} was evicted{when}"
        if self.protected_by is not None:
            return f"{token} stays: {self.protected_by}; score {self.score:.3g}"
        limit = (
            "" if self.threshold is None else f"; a cut now keeps scores from {self.threshold:.3g}"
        )
        return f"{token}: score {self.score:.3g}, {self.rank} of {self.num_ranked} to leave{limit}"


class Departures:
    """When the tokens of a layer left each head; one object for each layer."""

    def __init__(self) -> None:
        # int32 [B, H, T]: tokens read when each left; 0 while it is cached.
        self.left_at = torch.zeros(0, 0, 0, dtype=torch.int32)

    def note(self, positions: Tensor, seen: Tensor) -> None:
        """Note the tokens that a block or a step has evicted; mutates the object.

        Args:
            positions: of what each head caches now, int ``[B, H, S]``; -1 in an empty slot.
            seen: tokens read of each sequence, int64 ``[B]``.
        """
        positions, seen = positions.long().cpu(), seen.cpu().view(-1, 1, 1)
        (batch, heads), length = positions.shape[:2], int(seen.max())
        before = self.left_at
        if before.shape[:2] != (batch, heads):
            before = before.new_zeros(batch, heads, 0)
        left_at = before.new_zeros(batch, heads, length)
        common = min(length, before.shape[2])
        left_at[..., :common] = before[..., :common]
        left_at.masked_fill_(left_at > seen, 0)  # the tokens after it were taken back
        is_cached = torch.zeros(batch, heads, length + 1, dtype=torch.bool)
        is_cached.scatter_(2, positions.where(positions >= 0, length), True)
        is_gone = ~is_cached[..., :length] & (torch.arange(length) < seen) & (left_at == 0)
        self.left_at = torch.where(is_gone, seen.to(torch.int32), left_at)

    def select(self, indices: Tensor) -> None:
        """Follow `SlotState.index_select` with int64 indices; mutates the object."""
        self.left_at = self.left_at[indices.cpu()]

    def of(self, sequence: int, head: int, position: int) -> int | None:
        """Return the tokens read when a token left a head; ``None`` where that is not known."""
        if position >= self.left_at.shape[2]:
            return None
        return int(self.left_at[sequence, head, position]) or None


def standing(
    position: int,
    positions: Tensor,
    ranks: Tensor,
    protected: Tensor,
    budget: TokenBudget,
    total: int | None,
) -> Explanation:
    """Say where a token stands among the entries of its head.

    Args:
        position: of the token.
        positions: of the head's entries, int ``[N]``; -1 in an empty slot.
        ranks: fp32 ``[N]``, the lowest leave first; infinite where an entry is pinned.
        protected: bool ``[N]``, sinks and recent tokens.
        budget: of the sequence.
        total: entries that stay at a cut; ``None`` if the policy evicts nothing.
    """
    index = int((positions == position).nonzero()[0])
    is_pinned, score = ranks.isinf(), float(ranks[index])
    name = None
    if protected[index]:
        name = "sink" if position < budget.sink else "recent"
    elif is_pinned[index]:
        name = "pattern" if budget.num_static else "pinned"
    is_fixed = (positions >= 0) & (protected | is_pinned)
    is_ranked = (positions >= 0) & ~is_fixed
    ranked, ages = ranks[is_ranked], positions[is_ranked]
    threshold = rank = None
    if total is not None and 0 < (count := total - int(is_fixed.sum())) < len(ranked):
        threshold = float(ranked.sort(descending=True).values[count - 1])
    if name is None:
        rank = 1 + int(((ranked < score) | ((ranked == score) & (ages < position))).sum())
    return Explanation(position, True, name, score, rank, len(ranked), threshold)
