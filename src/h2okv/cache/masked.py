"""The masking oracle: keeps everything and masks what H2O would have evicted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from h2okv.cache.layer import Block, CacheLayer
from h2okv.cache.rope import rotate_to_ranks
from h2okv.cache.validation import check_finite
from h2okv.ops.decode import protected_entries
from h2okv.ops.reference import attention_with_scores


def choose_by_query(
    query: Tensor, key: Tensor, visible: Tensor, always: Tensor, most: Tensor, scale: float
) -> Tensor:
    """Which keys each query ``[B, HQ, T, D]`` attends to most, bool ``[B, HQ, T, N]``.

    Of the keys ``[B, H, N, D]`` in the order of the text, `visible` ``[B, H, T, N]`` is what
    causality and padding leave, and `always` ``[B, H, N]`` is seen without being chosen. Of the
    others each query head chooses so many, `most` ``[B, 1, 1]``; of equals the newer.
    """
    groups = query.shape[1] // key.shape[1]
    seen, kept = (t.repeat_interleave(groups, dim=1) for t in (visible, always.unsqueeze(2)))
    # A soft cap would not change the order.
    logits = query.float() @ key.float().repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    open_to_choice = seen & ~kept
    ranks = logits.masked_fill(~open_to_choice, -torch.inf)
    # Stable, from the newest on: among equals the newer comes first.
    order = ranks.flip(-1).argsort(dim=-1, descending=True, stable=True)
    best = order.argsort(dim=-1).flip(-1) < most.unsqueeze(-1)
    return (seen & kept) | (open_to_choice & best)


class MaskedLayer(CacheLayer):
    """Keeps every token and marks which are still alive; slow, large, and easy to check.

    The state's slots are the N tokens seen, in their order, padding too unless it is all of a
    chunk; a position of -1 is padding or evicted. With ``kv_bits`` numbers are rounded as they
    would be stored.
    """

    drops = False

    def _attend(self, block: Block) -> Tensor:
        query, key, value, real, _, _, scale, softcap = block
        held, length, given = self.state, key.shape[2], real
        past = held.num_slots
        if real is None:
            real = torch.ones(self.batch_size, length, dtype=torch.bool, device=self.device)
        always = self._always_seen(length) if self.policy.per_query and past else None
        scores, positions = self._block_entries(length, real)
        whole = [torch.cat(both, dim=2) for both in zip(self._tensors(), (key, value), strict=True)]
        held.keys, held.values = (self.storage.as_attended(states, past, given) for states in whole)
        held.scores = torch.cat([held.scores, scores], dim=2)
        held.positions = torch.cat([held.positions, positions], dim=2)
        causal = torch.ones(length, past + length, dtype=torch.bool, device=self.device).tril(past)
        visible = causal & (held.positions >= 0).unsqueeze(2) & real[:, None, :, None]
        keys, values = self._tensors()
        if self.rotation is not None:
            query, keys = self._rotated(query, past)
        weights = self._query_weights(given, length)
        if always is not None:
            visible = choose_by_query(query, keys, visible, always, held.num_static, scale)
            groups = query.shape[1] // self.num_kv_heads
            keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        output, sums = attention_with_scores(query, keys, values, visible, scale, softcap, weights)
        sums = sums.unflatten(1, (self.num_kv_heads, -1)).sum(dim=2)
        if self.scoring.looks_ahead and length > 1:
            sums = self._expected(block, sums, keys, held.positions >= 0, keys.shape[2])
        check_finite(self, sums)
        if self.policy.uses_keys and length > 1:
            sums = torch.zeros_like(sums)
        held.scores = self._decayed(held.scores, given, length) + sums.to(torch.float32)
        # The block's tokens have become entries.
        held.keys, held.values = (self.storage.as_held(states, past) for states in whole)
        held.norms = self._norms_of(self._tensors()[1])
        held.num_real_tokens += real.sum(dim=1)
        self.cumulative_length += length
        if self.policy.evicts:
            held.positions = torch.where(self._best(held.total), held.positions, -1)
        return output

    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self.state.stored("keys"), self.state.stored("values")  # never packed

    def _rotated(self, query: Tensor, past: int) -> tuple[Tensor, Tensor]:
        assert self.rotation is not None
        alive = self.state.positions >= 0
        # Tokens are held in the order of the text, so those alive before count the rank.
        ranks = alive.cumsum(dim=-1) - 1
        length = query.shape[2]
        limit = int(alive.sum(dim=-1).max())
        if length == 1 and past:
            limit = max(own.total for own in self.state.budgets) + 1
        factors = self.rotation.of_ranks(limit)
        keys = rotate_to_ranks(self._tensors()[0], ranks, factors)
        return rotate_to_ranks(query, ranks[:, :1, past:], factors), keys

    def _always_seen(self, length: int) -> Tensor:
        """Marks what no query has to choose: sinks, heavy hitters, and the block of T tokens."""
        assert self.state.num_static is not None
        before = self._best(self.state.total - self.state.num_static)
        return torch.cat([before, before.new_ones(*before.shape[:2], length)], dim=-1)

    def _best(self, total: Tensor) -> Tensor:
        """Marks so many entries (``[B, 1, 1]``), by a plain sort of everything alive."""
        held, newest = self.state, self.newest()
        held_keys = self._tensors()[0]
        priority = self._ranking(held.scores, held.positions, newest, keys=held_keys)
        protected = protected_entries(held.positions, newest, held.sink, held.recent)
        # Last key first: the dead, then the unprotected, then by priority, then by age.
        keys = (held.positions, priority, protected, held.positions >= 0)
        order = np.lexsort([key.cpu().numpy() for key in keys], axis=-1)
        place = torch.from_numpy(order).argsort(dim=-1).to(self.device)
        return (held.positions >= 0) & (place >= order.shape[-1] - total)

    @property
    def nbytes(self) -> int:
        """Bytes that dropping would hold for the entries alive (the mask itself saves none)."""
        if not self.holds_entries:
            return 0
        sizes = (self.key_size, self.value_size)
        entry = sum(self.storage.head_bytes(size, self.dtype) for size in sizes) + 4 + 4
        return int((self.state.positions >= 0).sum()) * entry
