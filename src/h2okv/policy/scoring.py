"""What the attention that an entry receives counts for; one class for each way of counting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from h2okv.ops.reference import AttentionSpec, softmax

# Earlier queries decide where the newest gives an entry nothing at all.
_FORGOTTEN = 1e-30


class Inputs(Enum):
    """What the cache must provide of a block of tokens for a rule."""

    NOTHING = "positions alone"
    SUMS = "the attention that each entry receives"
    WINDOW = "the attention of the prompt's last queries, once"
    KEYS = "the entries' keys"
    QUERIES = "the block's queries, keys and values"


@dataclass
class BlockView:
    """A block of T tokens as a rule sees it: N entries, the block's own at the end.

    The matrix of the block's probabilities is never needed for `sums`; a rule that wants it calls
    `probabilities`, in memory of T x N numbers.
    """

    query: Tensor
    """``[B, HQ, T, D]``, rotated as the model does; with ``evict_every`` means of up to four of a
    KV head's query heads."""
    key: Tensor
    """``[B, H, N, D]``, likewise."""
    value: Tensor
    """``[B, H, N, Dv]``."""
    entries: Tensor | None
    """bool ``[B, H, N]``, keys that are entries; ``None`` if all are."""
    real: Tensor | None
    """bool ``[B, T]``, queries that are no padding; ``None`` if all are."""
    spec: AttentionSpec
    """How the queries attend."""
    sums: Tensor
    """fp32 ``[B, H, N]``: the probabilities of each entry, added up over the queries and the heads
    of a KV head's group. Zero where the rule's `inputs` are the queries, but for a sequence's
    only token."""
    layer_idx: int
    module: Any
    """The attention module of the model, with its projections."""
    attend_from_behind: Callable[[], Tensor]
    """Re-evaluates the queries behind the block's end, each seeing all entries. Returns fp32
    ``[B, H, N]``: for each entry the L2 norm of its probabilities over tokens and the KV head's
    query heads, or their means."""

    def probabilities(self) -> Tensor:
        """Return the causal probabilities ``[B, H, G, T, N]``; zero for padding."""
        heads, length, count = self.key.shape[1], self.query.shape[2], self.key.shape[2]
        wide = torch.promote_types(self.query.dtype, torch.float32)
        query = self.query.to(wide).unflatten(1, (heads, -1))
        logits = query @ self.key.to(wide).unsqueeze(2).transpose(-1, -2) * self.spec.scale
        if (cap := self.spec.softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        visible = torch.ones(length, count, dtype=torch.bool, device=self.key.device)
        visible = visible.tril(count - length)
        if self.entries is not None:
            visible = visible & self.entries[:, :, None, None, :]
        logits = logits.masked_fill(~visible, -torch.inf)
        sinks = None if self.spec.sinks is None else self.spec.sinks.view(heads, -1, 1, 1)
        shares = softmax(logits, sinks).nan_to_num(0.0)
        return shares if self.real is None else shares * self.real[:, None, None, :, None]


class Scoring:
    """H2O's sum, and the frame of the others (arXiv 2306.14048, Algorithm 1).

    With ``P[i, j]`` the probability that query i gives entry j, added up over the query heads of
    the KV head's group, entry j has the score ``sum_i P[i, j]``. A single token always adds
    ``P[i, j]``; a block adds what `score_block` returns.
    """

    name: ClassVar[str] = "sum"
    inputs: ClassVar[Inputs] = Inputs.SUMS
    default_decay: ClassVar[float | None] = None
    """The decay where a user gives none."""
    takes_decay: ClassVar[bool] = False
    """Whether a user may give a decay."""
    weighs_norms: ClassVar[bool] = False
    """Whether scores are multiplied by the L1 norms of values, which steps of kernels know."""

    def __init__(self, decay: float | None = None) -> None:
        """Make a scoring; each query lowers what came before it by the factor ``decay``."""
        self.decay = self.default_decay if decay is None else decay

    @property
    def factor(self) -> float | None:
        """Factor of a query's attention with each later query; ``None`` for one."""
        return self.decay

    def decayed(self, scores: Tensor, count: Tensor) -> Tensor:
        """Return scores ``[B, H, N]`` after ``count`` ``[B]`` further queries."""
        return scores if self.factor is None else scores * power(self.factor, count).view(-1, 1, 1)

    def score_block(self, block: BlockView) -> Tensor:
        """Return what a block adds to the scores of its N entries, fp32 ``[B, H, N]``."""
        return block.sums

    def eviction_scores(
        self, scores: Tensor, positions: Tensor, newest: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Turn accumulated numbers, fp32 ``[B, H, N]``, into the scores that a rule ranks.

        Args:
            scores: accumulated numbers.
            positions: int32 ``[B, H, N]``; the result is meaningless where it is -1.
            newest: position of the newest token, int64 ``[B, 1, 1]``.
            weights: those of `Rule.value_weights`.
        """
        return scores if weights is None else scores * weights


class Mean(Scoring):
    """Attention per query that could give some: ``sum_i P[i, j] / (n - j + 1)``, n the newest.

    It takes the head start from old entries; tried and found worse in H2O (arXiv 2306.14048,
    appendix B.2); kvpress averages so.
    """

    name = "mean"

    def eviction_scores(
        self, scores: Tensor, positions: Tensor, newest: Tensor, weights: Tensor | None
    ) -> Tensor:
        # An entry has been seen by its own query and by each one since, whatever the blocks;
        # positions do not count padding, and neither does their difference.
        return scores / (newest.to(positions.dtype) - positions + 1)


class Decay(Scoring):
    """``sum_i decay ** (n - i) P[i, j]``, n the newest (A2SF, arXiv 2407.20485, section 3)."""

    name = "decay"
    default_decay = 0.995  # half of a query's attention is forgotten after 138 further ones
    takes_decay = True


class Last(Scoring):
    """``P[n, j]``, the attention of the newest query n (TOVA, arXiv 2401.06104, section 3.2).

    With ``policy="heavy"`` it is TOVA, except that each KV head chooses for itself.
    """

    name = "last"

    @property
    def factor(self) -> float:
        return _FORGOTTEN


class ValueNorm(Scoring):
    """``sum_i P[i, j] * (L1 norm of value j)`` (VATP, arXiv 2406.12335, section 3).

    The paper keeps the first tokens besides, whose values are small: ``sink=20`` in its H2O runs.
    With a decay, `Decay`'s sum takes the place of the plain one.
    """

    name = "value_norm"
    takes_decay = weighs_norms = True


class Expected(Scoring):
    """``sqrt(sum_i P'[i, j] ** 2) * (L1 norm of value j)``, P' of queries behind the block's end.

    Every query of each query head sees all entries there, whichever came first; with
    ``evict_every`` the mean of up to four query heads does, of which fewer are stored until a cut.
    Where spans cut a prompt too, an entry's largest score counts: a sum would favour old entries.
    The attention that an entry has received depends on the number of queries that came after it,
    and how soon; this does not. A single token adds ``P[i, j]``, as in `ValueNorm`. Related:
    Expected Attention (arXiv 2510.00636) models the queries by a Gaussian, KVzip (arXiv 2505.23416)
    has the model read the text twice.
    """

    name = "expected"
    inputs = Inputs.QUERIES
    weighs_norms = True

    def score_block(self, block: BlockView) -> Tensor:
        return block.attend_from_behind()


SCORINGS: tuple[type[Scoring], ...] = (Scoring, Mean, Decay, Last, ValueNorm, Expected)
"""The ways of counting."""


def power(decay: float, exponent: Tensor) -> Tensor:
    """Return ``decay ** exponent`` in fp32, never 0, which would turn infinite scores into NaN."""
    power = torch.exp(exponent.to(torch.float32) * math.log(decay))
    return power.clamp_(min=torch.finfo(torch.float32).tiny)
