"""Caches that mask instead of dropping, the oracle of the tests, and rules of papers' tables."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from h2okv.budget import TokenBudget
from h2okv.cache import H2OCache
from h2okv.cache.block import Block, BlockEntries
from h2okv.cache.layer import CacheLayer
from h2okv.cache.rope import rotate_to_ranks
from h2okv.cache.slot_state import KVStorage, SlotState
from h2okv.config import CacheConfig
from h2okv.ops.choice import protected_entries
from h2okv.ops.reference import attention_with_scores, compute_dtype
from h2okv.policy import Inputs, Rule, get_rule


class TopK(Rule):
    """Shows each query the entries that it attends to most (arXiv 2306.14048, Table 8, "TopK").

    It needs all of the cache at every step and saves no memory. Every query head chooses for
    itself, by its attention over the full cache. As in the frame, a block's own tokens are always
    seen, so ``evict_every=1`` is the paper's protocol.
    """

    name = "topk"
    evicts = False
    uses_scores = False

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Divide a budget as `Rule.allocate_budget` does."""
        return TokenBudget(budget.sink, heavy=0, recent=0, num_static=budget.heavy + budget.recent)


class TopKHeavy(TopK):
    """The same with heavy hitters (arXiv 2306.14048, Table 8, "TopK w. H2").

    The paper does not say how the two are put together. Here the heavy part is for the entries
    with the highest accumulated attention before the block, and of the others each query chooses
    as many as the recent part, as heavy hitters and window divide the budget in H2O.
    """

    name = "topk_heavy"
    uses_scores = True

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        """Divide a budget as `Rule.allocate_budget` does."""
        return TokenBudget(budget.sink, budget.heavy, recent=0, num_static=budget.recent)


PER_QUERY: dict[str, type[Rule]] = {rule.name: rule for rule in (TopK, TopKHeavy)}
"""Policies that choose entries again for every query, from a cache that keeps all of them."""


class ValueExtremes(Rule):
    """Keeps a quarter of the entries for the spread of their values, and draws the others.

    Both ideas of VaSE (arXiv 2606.03928) without its attention: where entries leave, those whose
    value has the largest difference between its largest and its smallest number stay, and of the
    others, besides sinks and window, every one has the same chance. The paper draws by attention,
    or by how keys differ, and protects a quarter of the budget, its first 4 tokens among them
    (``sink=4`` here).
    """

    name = "value_extremes"
    inputs = Inputs.NOTHING
    weighs_values = True

    def value_weights(self, values: Tensor) -> Tensor:
        """Return the spread of values ``[B, H, N, Dv]``, fp32 ``[B, H, N]``."""
        return (values.amax(dim=-1) - values.amin(dim=-1)).to(torch.float32)

    def eviction_scores(
        self, scores: Tensor, positions: Tensor, newest: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the spreads, infinite for pins, as `Rule.eviction_scores`."""
        return scores if weights is None else torch.where(scores.isinf(), scores, weights)

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        """Rank a quarter by spread, of equals the newer first, and the others by chance."""
        spreads = scores.masked_fill(positions < 0, -1.0)
        by_age = positions.argsort(dim=-1, stable=True)
        order = by_age.gather(-1, spreads.gather(-1, by_age).argsort(dim=-1, stable=True))
        rank = order.argsort(dim=-1) - positions.shape[-1]  # -1 has the largest spread
        is_extreme = rank >= -((positions >= 0).sum(dim=-1, keepdim=True) // 4)
        drawn = get_rule("random").priority(scores, positions, newest, layer_idx)
        return torch.where(is_extreme, (rank + positions.shape[-1] + 1).to(drawn.dtype), drawn)


def choose_by_query(
    query: Tensor, key: Tensor, visible: Tensor, always: Tensor, count: Tensor, scale: float
) -> Tensor:
    """Choose the keys that each query ``[B, HQ, T, D]`` attends to most, bool ``[B, HQ, T, N]``.

    Of the keys ``[B, H, N, D]`` in the order of the text, `visible` ``[B, H, T, N]`` is what
    causality and padding leave, and `always` ``[B, H, N]`` is seen without being chosen. Each query
    head chooses `count` ``[B, 1, 1]`` of the others; of equals the newer.
    """
    groups = query.shape[1] // key.shape[1]
    seen, chosen = (t.repeat_interleave(groups, dim=1) for t in (visible, always.unsqueeze(2)))
    # A soft cap would not change the order.
    query, key = (states.to(compute_dtype(states.dtype)) for states in (query, key))
    logits = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    open_to_choice = seen & ~chosen
    ranks = logits.masked_fill(~open_to_choice, -torch.inf)
    # Stable, from the newest on: among equals the newer comes first.
    order = ranks.flip(-1).argsort(dim=-1, descending=True, stable=True)
    best = order.argsort(dim=-1).flip(-1) < count.unsqueeze(-1)
    return (seen & chosen) | (open_to_choice & best)


class MaskedLayer(CacheLayer):
    """Keeps every token and marks which are still entries; slow, large, and easy to check.

    The state's slots are the N tokens seen, in their order, padding too unless it is all of a
    chunk; a position of -1 is padding or evicted. With ``kv_bits`` numbers are rounded as they
    would be stored.
    """

    def empty_slots(self, key: Tensor, value: Tensor) -> SlotState:
        """Make a state without slots, which stores nothing packed."""
        return SlotState.empty(key, value, KVStorage())

    def _count_on_meta(self, length: int) -> None:
        raise ValueError("a MaskedCache needs numbers, which a model on the meta device has not.")

    def _place(self, block: Block) -> BlockEntries:
        state, past = self.state, self.state.num_slots
        scores, positions = self._block_entries(block)
        key = torch.cat([state.stored("keys"), block.key], dim=2)
        value = torch.cat([state.stored("values"), block.value], dim=2)
        # What each query sees besides its own choice, before the block's tokens are there.
        self._always = None
        if isinstance(self.rule, TopK) and past:
            self._always = self._always_seen(block.length)
        state.scores = torch.cat([state.scores, scores], dim=2)
        state.positions = torch.cat([state.positions, positions], dim=2)
        state.keys, state.values = key, value
        attended_key, attended_value = self._as_attended(key, value, past, block.real)
        query = block.query
        if self.rotations.rolling is not None:
            query, attended_key = self._rotate(query, attended_key, past)
        return BlockEntries(
            past, key, value, state.scores, state.positions, query, attended_key, attended_value,
            state.positions >= 0,
        )  # fmt: skip

    def _rotate(self, query: Tensor, key: Tensor, past: int) -> tuple[Tensor, Tensor]:
        assert self.rotations.rolling is not None
        is_entry = self.state.positions >= 0
        # Tokens are in the order of the text, so the entries before count the rank.
        ranks = is_entry.cumsum(dim=-1) - 1
        limit = int(is_entry.sum(dim=-1).max())
        if query.shape[2] == 1 and past:
            span = 1 if self.spans is None else self.spans.length
            limit = max(budget.total for budget in self.state.budgets) + span
        factors = self.rotations.rolling.of_ranks(limit)
        keys = rotate_to_ranks(key, ranks, factors)
        return rotate_to_ranks(query, ranks[:, :1, past:], factors), keys

    def _rank_limit(self, length: int) -> int:
        return self.state.num_slots

    def _attend(self, block: Block, entries: BlockEntries) -> tuple[Tensor, Tensor]:
        length, past, real = block.length, entries.past, block.real
        causal = torch.ones(length, past + length, dtype=torch.bool, device=self.device).tril(past)
        if block.spec.reach is not None:
            columns = torch.arange(past + length, device=self.device)
            causal = (columns <= past + block.spec.reach.unsqueeze(-1)).unsqueeze(1)
        is_entry: Any = entries.is_entry
        visible = causal & is_entry.unsqueeze(2)
        if real is not None:
            visible = visible & real[:, None, :, None]
        query, keys, values = entries.query, entries.attended_key, entries.attended_value
        if self._always is not None:
            count: Any = self.state.num_static
            visible = choose_by_query(query, keys, visible, self._always, count, block.spec.scale)
            groups = query.shape[1] // self.num_kv_heads
            keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        weights = self._query_weights(block)
        output, sums = attention_with_scores(query, keys, values, visible, block.spec, weights)
        return output, sums.unflatten(1, (self.num_kv_heads, -1)).sum(dim=2)

    def _evict(self, entries: BlockEntries) -> None:
        state = self.state
        # The block's tokens have become entries.
        state.keys = self.storage.keys.as_stored(entries.key, entries.past, state.key_transform)
        state.values = self.storage.values.as_stored(entries.value, entries.past)
        state.scores = entries.scores
        if self.rule.weighs_values:
            state.value_weights = self.rule.value_weights(state.values)
        if self.rule.evicts:
            total = state.total
            if self.spans is not None:
                total = self.spans.totals(state, state.positions, self.is_late)
            protected = self.protected(state.positions, state.scores)
            state.positions = torch.where(self._best(total, protected), state.positions, -1)

    def _always_seen(self, length: int) -> Tensor:
        """Mark what no query has to choose: sinks, heavy hitters, and the block of T tokens."""
        state = self.state
        assert state.num_static is not None
        protected = protected_entries(state.positions, self.newest(), state.sink, state.recent)
        before = self._best(state.total - state.num_static, protected)
        return torch.cat([before, before.new_ones(*before.shape[:2], length)], dim=-1)

    def _best(self, total: Tensor, protected: Tensor) -> Tensor:
        """Mark the best `total` entries, ``[B, 1, 1]``, by a plain sort of all entries."""
        state, newest = self.state, self.newest()
        priority = self._rank(state.scores, state.positions, newest, keys=state.stored("keys"))
        # Last key first: other tokens, then the unprotected, then by priority, then by age.
        keys = (state.positions, priority, protected, state.positions >= 0)
        order = np.lexsort([key.cpu().numpy() for key in keys], axis=-1)
        rank = torch.from_numpy(order).argsort(dim=-1).to(self.device)
        return (state.positions >= 0) & (rank >= order.shape[-1] - total)

    @property
    def nbytes(self) -> int:
        """Bytes that dropping would hold for the entries (the mask itself saves none)."""
        if not self.holds_entries:
            return 0
        key_bytes = self.storage.keys.head_bytes(self.key_size, self.dtype)
        entry = key_bytes + self.storage.values.head_bytes(self.value_size, self.dtype) + 4 + 4
        return int((self.state.positions >= 0).sum()) * entry


class MaskedCache(H2OCache):
    """An `H2OCache` that keeps everything and masks what it would have evicted; slow."""

    layer_class = MaskedLayer

    def make_rule(self, policy: Any, cache: CacheConfig) -> Rule:
        """Make the rule that evicts, or chooses for each query."""
        rule = PER_QUERY[policy]() if isinstance(policy, str) and policy in PER_QUERY else policy
        return super().make_rule(rule, cache)

    def cuts(self, cache: CacheConfig) -> int | None:
        """Return the tokens between two cuts; ``None`` if blocks are not cut."""
        return cache.evict_every if isinstance(self.rule, TopK) else super().cuts(cache)

    def pin(self, spans: Any, length: int | None = None) -> None:
        """Pin as `H2OCache.pin` does, where entries leave."""
        if isinstance(self.rule, TopK):
            raise ValueError(f"policy={self.rule.name!r} evicts nothing; leave pins out.")
        super().pin(spans, length)

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to save."""
        raise ValueError("a MaskedCache cannot be saved, as it keeps all tokens; save an H2OCache.")
