"""The extension point: what every eviction rule says; H2O says nothing else."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from h2okv.budget import TokenBudget
from h2okv.ops.reference import value_norms
from h2okv.policy.scoring import BlockView, Inputs, Scoring, power


class Rule:
    """Decides which entries of a layer's cache are evicted first.

    The frame (``cache/layer.py``) protects the sinks and the recent window, evicts down to the
    budget and breaks ties (the older entry goes first). A rule says how the budget is divided
    (`allocate_budget`), what it sees of a block of tokens (`inputs`) and how that becomes a score
    (`score_block`), and how the entries outside the protected windows are ranked (`priority`). Most
    override a single method.
    """

    name: ClassVar[str]
    """Name in ``H2OCache(policy=...)``."""
    inputs: ClassVar[Inputs] = Inputs.SUMS
    """What the cache provides of each block. `Inputs.WINDOW` decides once, when the prompt has been
    read."""
    evicts: ClassVar[bool] = True
    """False for a rule that keeps every entry and so has no budget."""
    grows: bool = False
    """Whether the budget grows with the text (``H2OCache(grows=True)``)."""
    scoring: Scoring = Scoring()
    """What attention counts for, by ``H2OCache(scoring=...)``, of a rule of sums."""

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Divide the user's budget; the total must not change.

        Args:
            budget: the parts that the user gave, in tokens.

        Returns:
            The parts that the frame works with.
        """
        return budget

    def score_block(self, block: BlockView) -> Tensor:
        """Return what a block adds to the scores of its entries.

        A single token adds its probabilities, whatever this returns.

        Args:
            block: the block and what `inputs` declares of it.

        Returns:
            fp32 ``[B, H, N]``, finite and not negative.
        """
        return self.scoring.score_block(block)

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        """Rank the entries outside the protected windows; the lowest is evicted first.

        Unless overridden, by the accumulated score (H2O); a rule that sees nothing ranks all
        alike, and the older goes first. It must depend on its arguments only, elementwise
        over B and H, so that a sequence gets the same ranks alone and in a batch.

        Args:
            scores: accumulated attention as the cache's `Scoring` counts it, fp32 ``[B, H, N]``.
            positions: original positions, int32 ``[B, H, N]``; -1 marks an empty slot, and its
                priority is ignored.
            newest: position of the newest token of each sequence, int64 ``[B, 1, 1]``.
            layer_idx: the layer's index.

        Returns:
            fp32 ``[B, H, N]``, finite.
        """
        return scores if self.uses_scores else torch.zeros_like(scores)

    def key_priority(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rank entries by their keys, instead of `priority`; only for a rule that sees keys.

        Args:
            keys: the entries' keys, ``[B, H, N, D]``; anything finite in an empty slot.
            positions: as for `priority`.

        Returns:
            fp32 ``[B, H, N]``, finite.
        """
        raise NotImplementedError(f"policy {self.name!r} sees keys, so add key_priority")

    def static_mask(self, positions: Tensor, newest: Tensor, limit: Tensor) -> Tensor | None:
        """Mark the positions that are kept for their place; only if a budget has ``num_static``.

        What leaves the pattern as the text grows must never come back into it, since it may have
        been evicted by then.

        Args:
            positions: int32 ``[B, H, N]``; the mark means nothing where it is -1.
            newest: position of the newest token, int64 ``[B, 1, 1]``.
            limit: ``num_static`` of each sequence's budget, int64 ``[B, 1, 1]``: the largest number
                of marked positions up to the newest.

        Returns:
            bool ``[B, H, N]``; ``None`` for a rule without a pattern.
        """
        return None

    # --- what follows from the declarations -------------------------------------------------------

    @property
    def effective_inputs(self) -> Inputs:
        """What the cache must provide of a block."""
        return self.scoring.inputs if self.inputs is Inputs.SUMS else self.inputs

    @property
    def uses_scores(self) -> bool:
        """Whether the attention that entries receive changes what is kept."""
        return self.inputs not in (Inputs.NOTHING, Inputs.KEYS)

    @property
    def is_bounded(self) -> bool:
        """Whether a layer never holds more than a budget that stays."""
        return self.evicts and self.inputs is not Inputs.WINDOW and not self.grows

    @property
    def has_pattern(self) -> bool:
        """Whether a part of the budget is for a static pattern, or for each query's own choice."""
        return self.allocate_budget(TokenBudget(0, 2, 2)).num_static > 0

    @property
    def is_plain_sum(self) -> bool:
        """Whether scores are H2O's sums and nothing else counts."""
        by_sums = type(self).score_block is Rule.score_block and type(self.scoring) is Scoring
        return by_sums and not self.has_pattern and self.inputs is not Inputs.WINDOW

    @property
    def scores_spans(self) -> bool:
        """Whether scores can depend on the text alone, however it is cut (``evict_every``).

        Sums can, and so can what is scored at the end of a span by the span's queries.
        """
        by_sums = type(self).score_block is Rule.score_block
        by_sums &= type(self.scoring).score_block is Scoring.score_block
        can_wait = self.effective_inputs is Inputs.QUERIES
        return (by_sums or can_wait) and self.inputs is not Inputs.WINDOW

    @property
    def weighs_values(self) -> bool:
        """Whether entries carry weights of their values (`value_weights`)."""
        return self.scoring.weighs_norms

    @property
    def ranks_by_products(self) -> bool:
        """Whether ranks are the accumulated numbers times the weights of the values, if any."""
        is_plain = type(self.scoring).eviction_scores is Scoring.eviction_scores
        return self.ranks_by_scores and is_plain

    @property
    def weighs_queries(self) -> bool:
        """Whether some queries of a block may count for more in the sums than others."""
        return self.inputs is Inputs.WINDOW or self.scoring.factor is not None

    def query_weights(self, later: Tensor, recent: Tensor) -> Tensor:
        """Return what each query counts for, fp32 ``[B, T]``, if not all count for one.

        Args:
            later: number of real queries after each, int64 ``[B, T]``.
            recent: each sequence's recent tokens, int64 ``[B, 1]``.
        """
        if self.inputs is Inputs.WINDOW:
            return (later < recent).to(torch.float32)
        assert self.scoring.factor is not None, "weighs_queries says whether there is one"
        return power(self.scoring.factor, later)

    def value_weights(self, values: Tensor) -> Tensor:
        """Return positive weights of values ``[B, H, N, Dv]``, fp32 ``[B, H, N]``.

        They are kept with the entries, and multiply their scores.
        """
        return value_norms(values)

    def eviction_scores(
        self, scores: Tensor, positions: Tensor, newest: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the scores that are ranked, as `Scoring.eviction_scores`."""
        return self.scoring.eviction_scores(scores, positions, newest, weights)

    @property
    def ranks_by_scores(self) -> bool:
        """Whether ranks are the scores alone."""
        by_scores = type(self).priority is Rule.priority and self.uses_scores
        return by_scores and not self.has_pattern and self.inputs is not Inputs.WINDOW


class H2O(Rule):
    """Keeps the recent window and the highest accumulated attention (arXiv 2306.14048, Alg. 1)."""

    name = "h2o"


class Heavy(H2O):
    """Keeps heavy hitters alone, without a recent window (arXiv 2306.14048, Table 9)."""

    name = "heavy"

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, budget.heavy + budget.recent, recent=0)
