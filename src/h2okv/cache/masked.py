"""The masking oracle: keeps everything and masks what H2O would have evicted."""

from __future__ import annotations

import numpy as np
import torch

from h2okv.cache.layer import ScoredLayer
from h2okv.cache.rope import rotate_to_ranks
from h2okv.cache.validation import check_finite
from h2okv.ops.decode import protected_entries
from h2okv.ops.reference import attention_with_scores


def choose_by_query(
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    always: torch.Tensor,
    most: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Takes from each query all but the entries that it attends to most.

    Args:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, N, D]``, in the order of the text.
        visible: bool ``[B, H, T, N]``, what causality and padding leave.
        always: bool ``[B, H, N]``, entries that are seen without being chosen.
        most: int64 ``[B, 1, 1]``, how many of the others each query head chooses; of those with
            equal attention the newer.
        scale: factor on the logits.

    Returns:
        bool ``[B, HQ, T, N]``.
    """
    groups = query.shape[1] // key.shape[1]
    seen, kept = (t.repeat_interleave(groups, dim=1) for t in (visible, always.unsqueeze(2)))
    # A soft cap would not change the order.
    logits = query.float() @ key.float().repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    open_to_choice = seen & ~kept
    ranks = logits.masked_fill(~open_to_choice, -torch.inf)
    # Stable, from the newest on: among equals the newer comes first.
    order = ranks.flip(-1).argsort(dim=-1, descending=True, stable=True)
    places = torch.empty_like(order)
    counted = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    places.scatter_(-1, order, counted)
    best = places.flip(-1) < most.unsqueeze(-1)
    return (seen & kept) | (open_to_choice & best)


class SimulatedLayer(ScoredLayer):
    """Keeps every token and marks which are still alive; slow, large, and easy to check.

    State: ``keys [B, H, N, D]``, ``values [B, H, N, Dv]``, ``scores [B, H, N]`` fp32,
    ``positions [B, H, N]`` int32 (-1 = padding or evicted); N is the tokens seen with padding.
    """

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `ScoredLayer.attend`."""
        length, given = key.shape[2], real
        if real is None:
            real = torch.ones(self.batch_size, length, dtype=torch.bool, device=self.device)
        always = None
        if self.policy.per_query and self.positions is not None:
            always = self._always_seen(length)
        past = self._append(key, value, real)
        causal = torch.ones(length, past + length, dtype=torch.bool, device=self.device).tril(past)
        visible = causal & (self.positions >= 0).unsqueeze(2) & real[:, None, :, None]
        keys = self.keys
        if self.rotation is not None:
            query, keys = self._rotated(query, past)
        values, weights = self.values, self._query_weights(given, length)
        if always is not None:
            visible = choose_by_query(query, keys, visible, always, self.num_static, scale)
            groups = query.shape[1] // self.num_kv_heads
            keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        output, sums = attention_with_scores(query, keys, values, visible, scale, softcap, weights)
        sums = sums.unflatten(1, (self.num_kv_heads, -1)).sum(dim=2)
        check_finite(self, sums)
        self.scores = self._faded(self.scores, given, length) + sums.to(torch.float32)
        self.norms = self._norms_of(self.values)
        self.num_real_tokens += real.sum(dim=1)
        self.cumulative_length += length
        if self.policy.evicts:
            self._evict()
        return output

    def _rotated(self, query: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's queries and all keys at the ranks of those alive."""
        alive = self.positions >= 0
        # Tokens are held in the order of the text, so those alive before count the rank.
        ranks = alive.cumsum(dim=-1) - 1
        length = query.shape[2]
        limit = int(alive.sum(dim=-1).max())
        if length == 1 and past:
            limit = max(tokens.total for tokens in self.row_budgets) + 1
        factors = self.rotation.of_ranks(limit)
        return (
            rotate_to_ranks(query, ranks[:, :1, past:], factors),
            rotate_to_ranks(self.keys, ranks, factors),
        )

    def _append(self, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor) -> int:
        """Adds the block's entries; returns how many there were. Mutates the layer."""
        shape = key.shape[:3]
        positions = self.num_real_tokens.unsqueeze(1) + real.cumsum(dim=1) - 1
        positions = torch.where(real, positions, -1).to(torch.int32).unsqueeze(1).expand(shape)
        scores = torch.zeros(shape, dtype=torch.float32, device=self.device)
        if self.positions is None:
            # Detached: the key tensor given is marked with this layer, which would be a cycle.
            self.keys, self.values = key.detach(), value.detach()
            self.scores, self.positions = scores, positions
            return 0
        past = self.positions.shape[2]
        self.keys = torch.cat([self.keys, key], dim=2)
        self.values = torch.cat([self.values, value], dim=2)
        self.scores = torch.cat([self.scores, scores], dim=2)
        self.positions = torch.cat([self.positions, positions], dim=2)
        return past

    def _always_seen(self, length: int) -> torch.Tensor:
        """Marks what no query has to choose: sinks, heavy hitters, and the block of T tokens."""
        before = self._best(self.total - self.num_static)
        return torch.cat([before, before.new_ones(*before.shape[:2], length)], dim=-1)

    def _evict(self) -> None:
        """Marks what goes; mutates the layer."""
        self.positions = torch.where(self._best(self.total), self.positions, -1)

    def _best(self, total: torch.Tensor) -> torch.Tensor:
        """Marks so many entries (``[B, 1, 1]``), by a plain sort of everything alive."""
        newest = self.num_real_tokens.view(-1, 1, 1) - 1
        priority = self._ranking(self.scores, self.positions, newest)
        protected = protected_entries(self.positions, newest, self.sink, self.recent)
        alive = (self.positions >= 0).cpu().numpy()
        # Last key first: the dead, then the unprotected, then by priority, then by age.
        order = np.lexsort(
            (
                self.positions.cpu().numpy(),
                priority.cpu().numpy(),
                protected.cpu().numpy(),
                alive,
            ),
            axis=-1,
        )
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(order.shape[-1])[None, None], axis=-1)
        best = alive & (place >= order.shape[-1] - total.cpu().numpy())
        return torch.from_numpy(best).to(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes that dropping would hold for the entries alive (the mask itself saves none)."""
        if self.positions is None:
            return 0
        size = self.keys.element_size()
        entry = (self.key_size + self.value_size) * size + 4 + self.positions.element_size()
        return int((self.positions >= 0).sum()) * entry
