"""The exact H2O cache of one layer: a fixed number of slots."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2okv.cache.layer import Block, CacheLayer
from h2okv.cache.rope import ranks_of, rotate_to_ranks
from h2okv.cache.slot_state import MIN_GROWN_SLOTS, SlotState, ordinary_tensors, slots_for
from h2okv.cache.validation import check_finite
from h2okv.config import TokenBudget
from h2okv.ops.decode import (
    RotaryTables,
    StepRules,
    decode_step,
    keep_indices,
    pick,
    protected_entries,
    share_slots,
)
from h2okv.ops.deferred import Segments, evict_segments, evict_together
from h2okv.ops.dispatch import Operations, operations
from h2okv.ops.reference import Visibility
from h2okv.ops.rope import relative

pad = torch.nn.functional.pad
# Slots of a layer, of all sequences and heads, above which many small operations are no more what
# takes the time, and copies of all layers would be large.
_MOST_DEFERRED = 1 << 15


class SlotLayer(CacheLayer):
    """Keys, values, scores and positions in slots, of which one is always free.

    The order of the slots means nothing. A decode step writes into the free slot, attends over
    all slots, adds to the scores and finds the slot to free next; nothing is moved or sorted.

    There are ``S = K + 1`` slots once the cache is full. On a CPU a text shorter than the budget
    has as many as it needs and some to grow into; on a GPU, and for compiled steps, whose shapes
    must not change, all are there from the first block or the first such step on. When positions
    roll, keys are un-rotated, pairs next to each other.

    Heads with budgets of their own share one row of slots, so that none pays for another's: each
    slot has an owner, all queries of the layer meet all keys, and the products of other heads are
    hidden.
    """

    # Whether a block whose attention is not finite is refused. Of several ranks that hold parts of
    # a model one alone must not stop in the middle.
    checks_numbers = True
    # Called with the operation and its arguments in the place of a block's attention, where other
    # caches read the same block.
    shared: Any = None

    def _forget(self) -> None:
        super()._forget()
        self.operations: Operations | None = None
        # K + 1 of the largest budget; None where the policy does not bound it.
        self.capacity: int | None = None
        # Decode steps until slots may run out or all sequences may be full; -1: never.
        self.steps_left = -1
        # Whether no slot but the free one is empty, in any sequence.
        self.is_full = False
        # Entries of every sequence and head, as long as all take their slots in order.
        self.filled: int | None = None
        self.has_sinks = True
        # What each sequence's budget protects, sinks and recent tokens.
        self.protected: tuple[tuple[int, int], ...] = ()
        self.rules: StepRules | None = None  # of a deferred step
        self.segments: Segments | None = None  # of the layers whose steps are ended with this one's
        # Whether the next forward brings a part of a block that a later one ends (slot_pool.py),
        # and whether the last one did.
        self.is_partial_block = False
        self.had_partial_block = False

    def _forget_rotation(self) -> None:
        super()._forget_rotation()
        self.rotary: RotaryTables | None = None

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether all steps are alike, so that ``generate`` may compile or record them on a GPU."""
        return self.policy.is_bounded and not self.rule.rewrites

    def move(self, device: torch.device) -> None:
        super().move(device)
        self.operations = self.filled = None

    def _attend(self, block: Block) -> Tensor:
        in_parts = self.had_partial_block or self.is_partial_block
        if block.query.shape[2] == 1 and self.holds_entries and not in_parts and not self.pins:
            return self._decode(block)
        return self._append_block(block)

    # --- a single token ---------------------------------------------------------------------------

    def _decode(self, block: Block) -> Tensor:
        query, key, value, real, _, _, scale, softcap = block
        # In a compiled step a count that changes would compile it anew each time.
        filled = None
        if torch.compiler.is_compiling():
            self.make_static()
        else:
            self.count_down()
            filled = self.filled
        if filled is not None:  # after padding the slots may no longer be taken in their order
            self.filled = filled + 1 if real is None else None
        if not self.is_plain:
            self._prepare_step(value, real)
        if self.rotation is not None and self.rotary is None:
            self.make_rotary()
        recent, sink = self.state.recent, self.state.sink if self.has_sinks else None
        # A ranking by the scores alone is what a kernel can do.
        rank = None if self.ranks_by_scores else self._ranking
        rules = StepRules(scale, recent, sink, softcap, self.rotary, rank, self.is_full, filled)
        run = decode_step
        # On a CPU inductor makes more of operations that it sees than of a package of its own.
        if (query.is_cuda or not torch.compiler.is_compiling()) and self._held.owner is None:
            if self.operations is None:
                self._choose_operations(query)
            run = self.operations.step
        if run is decode_step and real is None and self._may_defer(rules):
            rules = rules._replace(deferred=True)
        output = run(query, key, value, self.state, rules, real)
        if self.deferred is not None and rules.deferred:
            self.is_deferred, self.rules = True, rules
            self.deferred.append(self)
        if self.deferred and self.ends_forward:
            self.end_steps()
        self.cumulative_length += 1
        return output

    def _may_defer(self, rules: StepRules) -> bool:
        """Whether a step may be ended by the cache's last layer, together with all others.

        On a CPU, where the number of a step's operations takes the time; a GPU has a kernel.
        """
        if self.deferred is None or torch.compiler.is_compiling() or self.device.type != "cpu":
            return False
        # A policy that ranks by more than scores may look at a layer's other tensors as they are.
        by_scores = self.policy.prompt_only or self._is_ranked_by_scores
        is_plain = by_scores and rules.full and rules.rotary is None
        return is_plain and self._held.positions.numel() <= _MOST_DEFERRED

    def end_steps(self) -> None:
        alike: dict[Any, list[SlotLayer]] = {}
        for layer in self.deferred or ():
            if layer.is_deferred:
                layer.is_deferred = False
                # Those that protect the same entries.
                alike.setdefault(layer.protected, []).append(layer)
        del (self.deferred or [])[:]
        for layers in alike.values():
            rules, held = layers[0].rules, [layer._held for layer in layers]
            shapes = {own.positions.shape for own in held}
            is_even = len(shapes) == 1 and all(own.owner is None for own in held)
            if rules.priority is not None and self.scoring.uses_values:
                rows = [own.norms if is_even else own.norms.flatten(1) for own in held]
                norms = torch.cat(rows) if is_even else torch.cat(rows, dim=1).unsqueeze(1)
                rules = rules._replace(priority=functools.partial(self._ranking, norms=norms))
            if is_even:
                evict_together(held, rules)
                continue
            first = layers[0]
            if first.segments is None or not first.segments.fits(held):
                with ordinary_tensors():
                    first.segments = Segments(held)
            evict_segments(held, rules, first.segments)

    def _choose_operations(self, query: Tensor) -> None:
        """Chooses what tokens run through until the next block; mutates the layer."""
        groups, is_packed = query.shape[1] // self.num_kv_heads, self.storage.bits is not None
        self.operations = operations(
            query.device, self.dtype, self.key_size, self.value_size, groups, is_packed
        )

    def _prepare_step(self, value: Tensor, real: Tensor | None) -> None:
        """What a scoring other than the sum does before a step; mutates the layer."""
        held = self.state
        if self.scoring.factor is not None:
            held.scores.copy_(self._decayed(held.scores, real, 1))
        if held.norms is not None:
            norms = self._norms_of(self.storage.round(value))
            held.norms.scatter_(-1, held.free_slot, norms.view_as(held.free_slot))

    def make_rotary(self) -> None:
        """Makes the tables that all decode steps share; mutates the layer."""
        assert self.rotation is not None
        to_rank = self.rotation.of_ranks(self._rank_limit(1))
        self.rotary = RotaryTables(to_rank, relative(to_rank))

    def _rank_limit(self, length: int) -> int:
        """Entries and new tokens that a block's ranks are below."""
        if not self.holds_entries:
            return length
        if length == 1:
            # Not by the budgets: a larger one's sequence may have been taken out.
            return max(self.capacity or 0, self.state.num_slots)
        return int(self._counts().max()) + length

    # --- a prompt, or a later turn ----------------------------------------------------------------

    def _append_block(self, block: Block) -> Tensor:
        query, key, value, real, _, _, scale, softcap = block
        held, length = self.state, key.shape[2]
        held.unshare()
        scores, positions = self._block_entries(length, real)
        past = held.num_slots
        if past:
            key = torch.cat([self.storage.read(held.keys, self.dtype), key], dim=2)
            value = torch.cat([self.storage.read(held.values, self.dtype), value], dim=2)
            scores = torch.cat([held.scores, scores], dim=2)
            positions = torch.cat([held.positions, positions], dim=2)
        exact_key, exact_value = key, value
        key, value = (self.storage.as_attended(own, past, real) for own in (key, value))
        entries = None if past == 0 and real is None else positions >= 0
        visibility = Visibility(past, entries, real)
        rotated = key
        if self.rotation is not None:
            query, rotated = self._rotate_block(query, key, positions, past)
        self._choose_operations(query)
        weights = self._query_weights(real, length)
        attend = self.operations.attend
        is_asked_again = self.scoring.looks_ahead and length > 1
        by_keys = self.policy.uses_keys and length > 1
        if self.shared is not None:
            attend = functools.partial(self.shared, attend)
        elif by_keys or (is_asked_again and real is None):
            # Of padded sequences that are asked again some may be a single token.
            attend = functools.partial(attend, needs_sums=False)
        output, sums = attend(query, rotated, value, visibility, scale, softcap, weights)
        if is_asked_again:
            limit = self._rank_limit(length)
            ask = functools.partial(self._expected, block, sums, rotated, entries, limit)
            sums = ask() if self.shared is None else self.shared.once(ask)
        del rotated
        if self.checks_numbers:
            # The last query sees every key.
            check_finite(self, output[:, :, -1] if by_keys else sums)
        if by_keys:
            sums = torch.zeros_like(sums)
        held.num_real_tokens += length if real is None else real.sum(dim=1)
        self.cumulative_length += length
        self.had_partial_block = self.is_partial_block
        if self.is_partial_block:  # of which more is to come: all is held, without slots for steps
            with ordinary_tensors():
                held.keys, held.values = key.clone(), value.clone()
                held.scores, held.positions = (scores + sums).clone(), positions.clone()
        else:
            scores = self._decayed(scores, real, length) + sums
            self._compact(exact_key, exact_value, scores, positions)
        return output

    def _rotate_block(
        self, query: Tensor, key: Tensor, positions: Tensor, past: int
    ) -> tuple[Tensor, Tensor]:
        """Rotates a block's queries and all keys ``[B, H, past + T, D]`` to their ranks."""
        taken = positions >= 0
        held = taken[..., :past].sum(dim=-1, keepdim=True)
        ranks = held + taken[..., past:].cumsum(dim=-1) - 1
        # All heads of a sequence hold the same number of entries.
        own = ranks[:, :1]
        if past:
            ranks = torch.cat([self.state.ranks, ranks], dim=-1)
        factors = self.rotation.of_ranks(self._rank_limit(query.shape[2]))
        return rotate_to_ranks(query, own, factors), rotate_to_ranks(key, ranks, factors)

    def _compact(self, key: Tensor, value: Tensor, scores: Tensor, positions: Tensor) -> None:
        newest, held = self.newest(), self.state
        total, limit = held.total, max(own.total for own in held.budgets)
        self.capacity = limit + 1 if self.policy.is_bounded else None
        if not self.policy.is_bounded:
            if not self.policy.evicts:
                total = (positions >= 0).sum(dim=-1, keepdim=True)
            limit = int(total.max())
        past = held.num_slots
        values = self.storage.as_held(value, past) if self.scoring.uses_values else value
        keys = self.storage.as_held(key, past) if self.policy.uses_keys else key
        indices, kept = keep_indices(
            self._ranking(scores, positions, newest, self._norms_of(values), keys),
            positions,
            protected_entries(positions, newest, held.sink, held.recent),
            total,
            limit,
        )
        if self.head_budgets is not None:
            self.capacity = int((total + 1).sum(dim=1).max())
            self._share(key, value, scores, positions, indices, kept)
            self._end_block()
            return
        num_slots = slots_for(indices.shape[2], self.capacity)
        if self.capacity is not None and self._is_static:
            num_slots = self.capacity
        empty = (0, num_slots - indices.shape[2])
        with ordinary_tensors():
            held.keys = self.storage.compact(key, held.keys, indices, num_slots)
            held.values = self.storage.compact(value, held.values, indices, num_slots)
            held.scores = pad(scores.gather(2, indices), empty)
            places = torch.where(kept, positions.gather(2, indices), -1)
            held.positions = pad(places, empty, value=-1)
            if self.scoring.uses_values:
                held.norms = self._norms_of(self.storage.read(held.values, self.dtype))
            held.free_slot = (held.positions < 0).to(torch.uint8).argmax(dim=-1, keepdim=True)
            if self.rotation is not None:
                held.ranks = ranks_of(held.positions)
                self.make_rotary()
        held.slot_mask = self._slots_within_budget()
        self._end_block()

    def _end_block(self) -> None:
        self._refresh_static_flags()
        # CUDA graphs are told that steps write where they read.
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            for tensor in (*self.state.tensors().values(), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)

    def _share(
        self,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        positions: Tensor,
        indices: Tensor,
        kept: Tensor,
        is_whole: bool = False,
    ) -> None:
        """Puts what heads keep into slots that they share, with some to grow into or all of them.

        Of ``[B, H, N, ...]`` what indices ``[B, H, K]`` name, where it is kept; mutates the state.
        """
        held = self.state
        room = held.total
        if not (self._is_static or is_whole):
            room = kept.sum(dim=-1, keepdim=True)
            room = torch.minimum(held.total, room + (room // 16).clamp_(min=MIN_GROWN_SLOTS))
        indices, kept, owner = share_slots(indices, kept, room)
        # What is nobody's is copied from anywhere.
        heads, num_slots = owner.long() % self.num_kv_heads, owner.shape[2]
        with ordinary_tensors():
            held.keys = self.storage.compact(key, held.keys, indices, num_slots, heads)
            held.values = self.storage.compact(value, held.values, indices, num_slots, heads)
            held.scores = pick(scores, indices, heads)
            held.positions = torch.where(kept, pick(positions, indices, heads), -1)
            if self.scoring.uses_values:
                held.norms = self._norms_of(self.storage.read(held.values, self.dtype))
            held.owner = owner.clone()
            held.free_slot = held.free_slot.view(len(owner), 1, -1)
            is_empty = (held.positions < 0) & ~held.of_others()
            free = is_empty.to(torch.uint8).argmax(dim=-1)
            held.free_slot = free.unsqueeze(1)

    def _count_on_meta(self, length: int) -> None:
        held, prompt = self.state, self.expected_length or length
        if not held.budgets:
            self._set_budgets([prompt] * self.batch_size)
            if self.head_budgets is not None:
                for name in ("keys", "values", "scores", "positions"):
                    setattr(held, name, getattr(held, name)[:, :1])
                held.free_slot = held.free_slot.view(self.batch_size, 1, -1)
                held.owner = held.positions.to(torch.uint8)
            held.norms = held.scores.clone() if self.scoring.uses_values else None
            held.ranks = held.positions.clone() if self.rule.rolls else None
            allocate = self.policy.allocate_budget
            budgets = [own.resolve(prompt) for own in self.head_budgets or (self.budget,)]
            most = sum(allocate(budget).total + 1 for budget in budgets)
            self.capacity = most if self.policy.is_bounded else None
            # What goes for good where whatever follows the prompt is kept.
            self.num_evicted = max(0, length + 1 - most) if self.policy.prompt_only else 0
        self.cumulative_length += length
        self.num_forwards += 1
        needed = int(self.cumulative_length) - self.num_evicted
        if held.num_slots <= needed and held.num_slots != self.capacity:
            # As on a GPU, where all slots of a budget are there from the first block on.
            held.resize(self.capacity or slots_for(needed))

    # --- how many slots there are, and which of them are open -------------------------------------

    @property
    def _is_static(self) -> bool:
        return self.device.type == "cuda" or torch.compiler.is_compiling()

    def make_static(self) -> None:
        if self.capacity is not None and self.state.num_slots < self.capacity:
            self._add_slots(self.capacity)
            if not torch.compiler.is_compiling():
                self._refresh_static_flags()
        self.filled = None  # compiled steps do not count

    def count_down(self) -> None:
        """Counts a step, and looks after the slots where it is due; mutates the layer."""
        if self.steps_left == 0:
            self._refresh_static_flags()
        if self.steps_left > 0:
            self.steps_left -= 1

    def _refresh_static_flags(self) -> None:
        """Notes what steps may leave out, and makes slots for them; seldom, as the device waits."""
        held, counts = self.state, self._counts()
        self.note_protected(held.budgets)
        # Sequences with budgets of their own are never full all together.
        is_even = self.policy.is_bounded and held.slot_mask is None
        steps = [int((held.total - counts).max())] if is_even else []
        self.is_full = steps == [0]
        if held.owner is not None:
            for is_last in (False, True):
                own = (~self.state.of_others()).sum(dim=-1, keepdim=True)
                # Steps of heads whose slots have still to grow.
                rest = (own - 1 - counts)[own <= held.total].tolist()
                if 0 not in rest or is_last:
                    break
                self._add_slots()
            steps += rest
        elif self.capacity is None or held.num_slots < self.capacity:
            most = int(counts.max())
            if held.num_slots == most + 1:
                self._add_slots(slots_for(most, self.capacity))
            if held.num_slots != self.capacity:
                steps.append(held.num_slots - most - 1)
        self.steps_left = -1 if self.is_full else min(steps, default=-1)
        self.filled = None if self.is_full or not self.steps_left else self._find_filled(counts)

    def note_protected(self, budgets: Sequence[TokenBudget]) -> None:
        """Notes what no step may evict; mutates the layer."""
        self.protected = tuple((budget.sink, budget.recent) for budget in budgets)
        self.has_sinks = any(sink for sink, _ in self.protected)

    def _find_filled(self, counts: Tensor) -> int | None:
        """Entries of every sequence and head, where they stand in the first slots; else ``None``.

        On a CPU a step that takes the next slot has half as many operations as one that looks for
        it. The slots' scores are zero then; mutates the state.
        """
        held = self.state
        is_plain = held.ranks is None and self.storage.bits is None and held.owner is None
        if self._is_static or not is_plain or self.policy.is_bounded and held.slot_mask is not None:
            return None
        filled = int(counts.flatten()[0])
        in_order = (counts == filled) & (held.free_slot == filled)
        if not bool(in_order.all() & (held.positions[..., :filled] >= 0).all()):
            return None
        held.scores[..., filled:] = 0.0
        return filled

    def _add_slots(self, num_slots: int = 0) -> None:
        """Makes so many slots; of shared ones all that there may be, or some more for each head."""
        held = self.state
        if held.owner is not None:
            held.unshare()
            order = (held.positions < 0).to(torch.uint8).argsort(dim=-1, stable=True)
            taken, is_whole = held.positions.gather(-1, order) >= 0, num_slots == self.capacity
            keys, values = (self.storage.read(own, self.dtype) for own in (held.keys, held.values))
            self._share(keys, values, held.scores, held.positions, order, taken, is_whole)
            return
        held.resize(num_slots)
        held.slot_mask = self._slots_within_budget()

    def _counts(self) -> Tensor:
        """Entries held, int64 ``[B, H, 1]``."""
        (positions,) = self.state.by_head("positions")
        return (positions >= 0).sum(dim=-1, keepdim=True)

    def _slots_within_budget(self) -> Tensor | None:
        """Marks at most ``K + 1`` slots of each sequence; ``None`` if all have one budget."""
        held = self.state
        # Shared slots beyond a sequence's own are nobody's.
        if not self.policy.is_bounded or held.owner is not None:
            return None
        if all(own.total + 1 == self.capacity for own in held.budgets):
            return None
        taken = (held.positions >= 0).scatter(-1, held.free_slot, True)
        # Of the empty slots, as many stay open as the sequence's own budget leaves.
        rank = (~taken).cumsum(dim=-1)
        return taken | (rank <= held.total + 1 - taken.sum(dim=-1, keepdim=True))

    @property
    def is_ready(self) -> bool:
        """Whether a decode step needs nothing that only a block finds out."""
        is_known = self.operations is not None and self.owner is not None
        is_known &= self.rotation is None or self.rotary is not None
        return is_known and self.holds_entries and self.policy.is_bounded

    def join(self, other: SlotLayer) -> None:
        """Puts another layer's sequences behind these; mutates this layer, uses up the other."""
        held, theirs = self.state, other.state
        held.slot_mask = theirs.slot_mask = None
        held.cat(theirs)
        self.cumulative_length = torch.maximum(self.cumulative_length, other.cumulative_length)
        if self.capacity is not None and other.capacity is not None:
            self.capacity = max(self.capacity, other.capacity, held.num_slots)
            held.slot_mask = self._slots_within_budget()
        self.rotary = None  # of as many ranks as there were slots
        self._refresh_static_flags()
        other.reset()

    def load_state(self, state: SlotState, seen: Tensor, weights: str | None) -> None:
        super().load_state(state, seen, weights)
        if self.policy.is_bounded:
            self.capacity = max(*(own.total + 1 for own in state.budgets), state.num_slots)
            if state.owner is not None:
                self.capacity = int((state.total + 1).sum(dim=1).max())
            state.slot_mask = self._slots_within_budget()
        self._refresh_static_flags()
