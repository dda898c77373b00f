"""What a layer adds to scores, and how it ranks entries by them."""

from __future__ import annotations

import torch

from h2okv.cache.rows import RowLayer
from h2okv.policy import Policy
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

    def row_tensors(self) -> tuple[str, ...]:
        """Names the attributes whose first dimension is the batch."""
        return (*super().row_tensors(), "norms")

    @property
    def is_plain(self) -> bool:
        """Whether every query counts for one and a policy sees the sums as they are."""
        return self.scoring.is_plain

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
            fp32 ``[B, H, N]``.
        """
        if not self.scoring.is_plain:
            norms = self.norms if norms is None else norms
            scores = self.scoring.worth(scores, positions, newest, norms)
        return self.policy.priority(scores, positions, newest, self.layer_idx)

    def _norms_of(self, values: torch.Tensor) -> torch.Tensor | None:
        """L1 norms of values ``[B, H, N, Dv]``, fp32 ``[B, H, N]``; ``None`` if not asked for."""
        if not self.scoring.uses_values:
            return None
        return torch.linalg.vector_norm(values, ord=1, dim=-1, dtype=torch.float32)
