"""What a layer adds to scores, and how it ranks entries by them."""

from __future__ import annotations

import torch

from h2okv.cache.rows import RowLayer
from h2okv.config import TokenBudget
from h2okv.policy import Policy
from h2okv.policy.h2o import H2OPolicy
from h2okv.policy.scoring import Scoring


class WeighingLayer(RowLayer):
    """The part of a layer that knows its policy and its scoring.

    `ScoredLayer` is made of it; nothing here is done for H2O's own sums (`is_plain`).
    """

    layer_idx: int
    policy: Policy
    scoring: Scoring
    scores: torch.Tensor | None
    positions: torch.Tensor | None
    num_real_tokens: torch.Tensor | None
    norms: torch.Tensor | None
    recent: torch.Tensor
    total: torch.Tensor
    chosen: torch.Tensor | None

    def row_tensors(self) -> tuple[str, ...]:
        """Names the attributes whose first dimension is the batch."""
        return (*super().row_tensors(), "norms", "chosen")

    @property
    def marks_pattern(self) -> bool:
        """Whether the policy keeps entries by a rule of its own, in every cache it is used for."""
        return self.policy.apportion(TokenBudget(0, 2, 2)).chosen > 0

    @property
    def is_plain(self) -> bool:
        """Whether it is H2O's frame and no more: plain sums, nothing kept by a rule of its own."""
        return self.scoring.is_plain and self.chosen is None and not self.policy.prompt_only

    @property
    def ranks_by_scores(self) -> bool:
        """Whether a decode step may evict by the accumulated scores as they stand."""
        if self.policy.prompt_only:  # which evicts nothing then
            return True
        by_scores = type(self.policy).priority is H2OPolicy.priority
        return by_scores and self.scoring.ranks_by_state and self.chosen is None

    def worth(self) -> torch.Tensor:
        """The scores of what is held as the policy sees them, fp32 ``[B, H, S]``."""
        newest = self.num_real_tokens.view(-1, 1, 1) - 1
        return self.scoring.worth(self.scores, self.positions, newest, self.norms)

    def _query_weights(self, real: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """What each query of a block counts for in the scores.

        Args:
            real: bool ``[B, T]``, False for padding; ``None`` if there is none.
            length: T.

        Returns:
            fp32 ``[B, T]``; ``None`` if each counts for one.
        """
        if self.is_plain:
            return None
        if real is None:
            later = torch.arange(length - 1, -1, -1, device=self.device)
            later = later.expand(self.batch_size, length)
        else:
            later = real.sum(dim=1, keepdim=True) - real.cumsum(dim=1)
        if self.policy.prompt_only:
            return (later < self.recent.flatten(1)).to(torch.float32)
        return self.scoring.query_weights(later)

    def _faded(self, scores: torch.Tensor, real: torch.Tensor | None, length: int) -> torch.Tensor:
        """What scores from before a block are worth after it, ``[B, H, N]``."""
        if self.scoring.decay is None:
            return scores
        if real is None:
            count = torch.full((self.batch_size,), length, device=self.device)
        else:
            count = real.sum(dim=1)
        return self.scoring.fade(scores, count)

    def _ranking(
        self,
        scores: torch.Tensor,
        positions: torch.Tensor,
        newest: torch.Tensor,
        norms: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ranks entries as `Policy.priority` does, by the scores that the scoring makes.

        Args:
            scores: accumulated, fp32 ``[B, H, N]``.
            positions: int32 ``[B, H, N]``.
            newest: int64 ``[B, 1, 1]``.
            norms: of the values, fp32 ``[B, H, N]``; ``None`` for those of the layer.

        Returns:
            fp32 ``[B, H, N]``; infinite where the policy's pattern keeps an entry.
        """
        if not self.scoring.is_plain:
            norms = self.norms if norms is None else norms
            scores = self.scoring.worth(scores, positions, newest, norms)
        if self.policy.prompt_only:
            # Of the window itself nothing is to be decided, so it has no say in its neighbours.
            scores = scores.masked_fill(positions > newest - self.recent, 0.0)
        ranks = self.policy.priority(scores, positions, newest, self.layer_idx)
        if self.chosen is not None:
            marked = self.policy.in_pattern(positions, newest, self.chosen)
            ranks = ranks if marked is None else ranks.masked_fill(marked, torch.inf)
        return ranks

    def _admit(self, real: torch.Tensor | None, length: int) -> None:
        """Makes room in the budget for tokens that stay whatever comes; mutates the layer."""
        count = length if real is None else real.sum(dim=1).view(-1, 1, 1)
        self.recent += count
        self.total += count

    def _norms_of(self, values: torch.Tensor) -> torch.Tensor | None:
        """L1 norms of values ``[B, H, N, Dv]``, fp32 ``[B, H, N]``; ``None`` if not asked for."""
        if not self.scoring.uses_values:
            return None
        return torch.linalg.vector_norm(values, ord=1, dim=-1, dtype=torch.float32)
