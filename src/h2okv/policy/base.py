"""The frame that every eviction policy shares."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from h2okv.config import TokenBudget


class Policy:
    """Decides which entries of a layer's cache go first.

    The frame (``ops/decode.py``) protects the sinks and the recent window, evicts down to
    the budget and breaks ties (the older entry goes first). A policy says how the budget is divided
    among these parts and gives the remaining entries a priority; that is all.
    """

    name: ClassVar[str]
    """What the user writes in ``H2OCache(policy=...)``."""
    evicts: ClassVar[bool] = True
    """False for a policy that never evicts and so has no budget."""
    uses_scores: ClassVar[bool] = True
    """False for a policy that would keep the same entries whatever attention they receive."""
    uses_keys: ClassVar[bool] = False
    """True for a policy that ranks by `key_priority`, with ``uses_scores = False``; no scores are
    made of prompts then."""
    prompt_only: ClassVar[bool] = False
    """True for a policy that decides once, when the prompt has been read, by the attention of the
    prompt's last ``recent`` queries alone; whatever comes later is kept, and the cache grows."""
    per_query: ClassVar[bool] = False
    """True for a policy that keeps everything and lets each query see ``sink + heavy + num_static``
    entries of what was there before its block, ``num_static`` of them by its own attention."""

    @property
    def is_bounded(self) -> bool:
        """Whether a layer never holds more than its budget."""
        return self.evicts and not self.prompt_only

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Divides the user's budget; the total must not change.

        Args:
            budget: the parts that the user asked for, in tokens.

        Returns:
            The parts that the frame works with.
        """
        return budget

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        """Ranks the entries outside the protected windows; the lowest is evicted first.

        Unless overridden, the accumulated attention itself (H2O); where ``uses_scores`` is False
        all are equal, so that the older goes first. It must depend on nothing but its arguments,
        elementwise over B and H, so that a sequence gets the same priorities alone and in a batch.

        Args:
            scores: accumulated attention as the cache's `Scoring` counts it, fp32 ``[B, H, N]``.
            positions: original positions, int32 ``[B, H, N]``; -1 marks an empty slot, whose
                priority is ignored.
            newest: position of the newest token of each sequence, int64 ``[B, 1, 1]``.
            layer_idx: the layer that asks.

        Returns:
            fp32 ``[B, H, N]``, finite.
        """
        return scores if self.uses_scores else torch.zeros_like(scores)

    def key_priority(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Ranks entries by their keys, in the place of `priority`; only if ``uses_keys``.

        Args:
            keys: as they are held, ``[B, H, N, D]``; anything finite in an empty slot.
            positions: as for `priority`.

        Returns:
            fp32 ``[B, H, N]``, finite.
        """
        raise NotImplementedError(f"policy {self.name!r} has uses_keys, so add key_priority")

    def static_mask(self, positions: Tensor, newest: Tensor, limit: Tensor) -> Tensor | None:
        """Marks the positions that are kept for their place; only if a budget has ``num_static``.

        What leaves the pattern as the text grows must never come back into it, since it may be
        gone by then.

        Args:
            positions: int32 ``[B, H, N]``; the mark means nothing where it is -1.
            newest: position of the newest token, int64 ``[B, 1, 1]``.
            limit: ``num_static`` of each sequence's budget, int64 ``[B, 1, 1]``: of the positions
                up to the newest at most so many may be marked.

        Returns:
            bool ``[B, H, N]``; ``None`` for a policy without a pattern.
        """
        return None
