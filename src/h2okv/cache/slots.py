"""How many slots a layer has, which of them are open, and what its steps may leave out."""

from __future__ import annotations

import operator
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h2okv.cache.block import Block, BlockEntries
from h2okv.cache.drafting import Plan
from h2okv.cache.slot_state import (
    MIN_GROWN_SLOTS,
    KVStorage,
    SlotState,
    ordinary_tensors,
    slots_for,
)
from h2okv.ops.append import Tail
from h2okv.ops.compaction import pick, share_slots
from h2okv.ops.dispatch import Cut, Operations
from h2okv.policy import Inputs, Rule

if TYPE_CHECKING:
    from h2okv.ops import triton_cut

pad = torch.nn.functional.pad


class SlotPlan:
    """The slots of one layer: their number, and what is known of them without looking.

    A full cache has ``S = K + span`` slots, and a span is one token unless the cache
    evicts every c tokens. On a CPU a text shorter than the budget has as many as it needs and some
    to grow into; on a GPU, and for compiled steps, whose shapes must not change, all are there from
    the first block or the first such step on.

    Heads with budgets of their own share one row of slots, so that none pays for another's: each
    slot belongs to a head, all queries of the layer meet all keys, and the products of other heads
    are hidden.
    """

    def __init__(self, rule: Rule, storage: KVStorage, is_by_head: bool, span: int = 1) -> None:
        self.rule, self.storage, self.is_by_head, self.span = rule, storage, is_by_head, span
        # Every step reads these; the rule would derive them again each time.
        self.adds = span == 1 or rule.effective_inputs not in (Inputs.KEYS, Inputs.QUERIES)
        self.changes_scores = rule.scoring.factor is not None  # of all entries, in each step
        # Else a cut weighs what came since. Steps themselves know the norms of exact values.
        self.weighs_values = rule.weighs_values and self.adds
        is_known = rule.scoring.weighs_norms and not storage.is_packed
        self.weighs_norms = self.weighs_values and is_known
        self.ranks_by_sums = rule.ranks_by_products and self.weighs_norms == self.weighs_values
        self.forget()

    def forget(self) -> None:
        """Forget the slots; mutates the plan."""
        self.operations: Operations | None = None
        # K + span of the largest budget; None where the rule does not bound it.
        self.capacity: int | None = None
        # Decode steps until slots may run out or all sequences may be full; -1: never.
        self.steps_left = -1
        # Steps until the span of a sequence ends, where spans are longer than one token.
        self.steps_to_cut = 0
        # Whether no slot but the free one is empty, in any sequence.
        self.is_full = False
        # The next slots, as long as all heads take them in their order and nothing is evicted; the
        # first step after a change looks for them.
        self.tail: Tail | None = None
        self.looks_for_tail = True
        # Sinks and recent tokens that the budget of every sequence protects.
        self.protected: tuple[int, int] | None = None  # None: they differ
        self.has_sinks = True
        # Whether each of the heads that share a row has all the slots that it may need.
        self.has_all_slots = False
        self.most_slots: int | None = None  # of the head that has most, if the host knows it
        self.reserved = 0  # slots of a pool's largest head, for which steps are recorded once

    def __getstate__(self) -> dict[str, object]:
        """Leave out of a pickle what is chosen for a machine and what the slots tell."""
        return vars(self) | {"operations": None, "tail": None, "looks_for_tail": True}

    def counters(self) -> Plan:
        """Return what steps count, for steps that are taken back."""
        names = ("capacity", "steps_left", "steps_to_cut", "is_full", "has_all_slots")
        return {name: getattr(self, name) for name in names}

    def store(
        self,
        state: SlotState,
        entries: BlockEntries,
        indices: Tensor,
        is_kept: Tensor,
        is_inner: bool,
    ) -> None:
        """Fill new slots with the entries of indices ``[B, H, K]`` that are kept; mutates both.

        Between the blocks of a forward (`Block.is_inner`) each head has a row of K slots, and none
        is free.
        """
        if is_inner:
            with ordinary_tensors():
                self._fill(state, entries, indices, is_kept, indices.shape[2], weighs=False)
            return
        if self.is_by_head:
            self.capacity = self.row_slots(state) if self.rule.is_bounded else None
            self._share(state, entries, indices, is_kept, self._is_static(state))
            return
        with ordinary_tensors():
            self._fill(state, entries, indices, is_kept, self._num_slots(state, indices.shape[2]))
            state.free_slot = (state.positions < 0).to(torch.uint8).argmax(dim=-1, keepdim=True)

    def _fill(
        self,
        state: SlotState,
        entries: BlockEntries,
        indices: Tensor,
        is_kept: Tensor,
        num_slots: int,
        weighs: bool = True,
    ) -> None:
        """Put entries into new slots, whose heads are those of the state; mutates the state."""
        heads = None
        if state.head_of_slot is not None:  # slots of no head are copied from any
            heads = state.head_of_slot.long() % entries.key.shape[1]
        state.keys = self.storage.keys.compact(
            entries.key, state.keys, indices, num_slots, heads, state.key_transform
        )
        if state.has_values:
            state.values = self.storage.values.compact(
                entries.value, state.values, indices, num_slots, heads
            )
        for name, tensor in entries.metadata(state).items():
            picked = tensor.gather(2, indices) if heads is None else pick(tensor, indices, heads)
            if empty := (kind := state.kinds[name]).empty_value(num_slots):  # what is 0 may stay
                picked = torch.where(is_kept, picked, empty)
            setattr(state, name, kind.resized(picked, num_slots))
        if weighs and self.rule.weighs_values:
            values = self.storage.values.read(state.values, entries.key.dtype)
            state.value_weights = self.rule.value_weights(values)

    def _share(
        self, state: SlotState, entries: BlockEntries, indices: Tensor, is_kept: Tensor, full: bool
    ) -> None:
        """Put the entries of all heads into one row of slots, with some to grow into or all."""
        room = limit = self._limit(state)
        num_slots, self.has_all_slots = self.row_slots(state), full
        if not full:
            room = is_kept.sum(dim=-1, keepdim=True)
            room = torch.minimum(limit, room + (room // 16).clamp_(min=MIN_GROWN_SLOTS))
            num_slots = int((room + 1).sum(dim=1).max())
        indices, is_kept, head_of_slot = share_slots(indices, is_kept, room, num_slots)
        with ordinary_tensors():
            state.head_of_slot = head_of_slot.clone()
            self._fill(state, entries, indices, is_kept, num_slots)
            state.free_slot = state.free_slot.view(len(head_of_slot), 1, -1)
            is_empty = (state.positions < 0) & ~state.of_others()
            state.free_slot = is_empty.to(torch.uint8).argmax(dim=-1).unsqueeze(1)

    # --- the same by kernels ----------------------------------------------------------------------

    def has_rooms(self, state: SlotState) -> bool:
        """Tell whether heads that share a row have all their slots, one head behind the other."""
        return self.has_all_slots if state.head_of_slot is not None else self._is_static(state)

    def _rooms(self, state: SlotState, is_new: bool = False) -> triton_cut.Rooms | None:
        """Return how heads share a row, now or in new slots; ``None`` if they do not."""
        from h2okv.ops.triton_cut import Rooms

        if not is_new and state.head_of_slot is None:
            return None
        if not is_new:
            return Rooms(state.total, self.span, self.head_slots(state) or 0)
        rooms = [[total + self.span for total in totals] for totals in state.totals()]
        largest, num_slots = max(map(max, rooms)), self.row_slots(state)
        largest = max(largest, *(num_slots - sum(room[:-1]) for room in rooms))
        return Rooms(state.total, self.span, largest)

    @staticmethod
    def rows(state: SlotState) -> triton_cut.Rows:
        """Return the slots as kernels take them."""
        from h2okv.ops.triton_cut import Rows

        assert isinstance(state.keys, Tensor)
        assert isinstance(state.values, Tensor)
        return Rows(state.keys, state.values, state.scores, state.positions, state.value_weights)

    def by_head(self, kernels: Cut, state: SlotState) -> triton_cut.Rows:
        """Return a row of slots for each head; copies of shared ones."""
        slots = self.rows(state)
        rooms = self._rooms(state)
        if rooms is None:
            return slots
        rows = _empty_rows(slots, state.free_slot.shape[2], rooms.largest)
        kernels.move(slots, rows, state.free_slot.shape[2], rooms=rooms)
        return rows

    def join(
        self, kernels: Cut, state: SlotState, block: Block, scores: Tensor, positions: Tensor
    ) -> tuple[triton_cut.Rows, Tensor]:
        """Return all entries of a block, and which of them are some, bool ``[B, H, N]``."""
        slots = self.rows(state)
        tokens = slots._replace(
            keys=block.key, values=block.value, scores=scores, positions=positions
        )
        with ordinary_tensors():
            joined: tuple[triton_cut.Rows, Tensor] = kernels.join(slots, tokens, self._rooms(state))
        return joined

    def store_by(
        self,
        kernels: Cut,
        state: SlotState,
        entries: BlockEntries,
        weights: Tensor | None,
        chosen: triton_cut.Chosen,
        limit: int,
    ) -> None:
        """Fill slots with the entries chosen, of weights ``[B, H, N]``; mutates both.

        New ones, unless the state has all that there may be: then their addresses stay.
        """
        from h2okv.ops.triton_cut import Rows

        (batch, heads, count), rooms = entries.positions.shape, None
        num_slots = self._num_slots(state, min(limit, count))
        is_shared = state.head_of_slot is not None
        is_there = state.num_slots > 0 and self.has_rooms(state) and is_shared == self.is_by_head
        if self.is_by_head:
            self.capacity = num_slots = self.row_slots(state)
            rooms, self.has_all_slots = self._rooms(state, is_new=True), True
        source = Rows(entries.key, entries.value, entries.scores, entries.positions, weights)
        with ordinary_tensors():
            if not is_there or state.num_slots != num_slots:
                target = _empty_rows(source, 1 if self.is_by_head else heads, num_slots)
                state.keys, state.values, state.scores, state.positions = target[:4]
                state.value_weights = target.weights
                shape = (batch, 1, heads) if self.is_by_head else (batch, heads, 1)
                state.free_slot = state.num_real_tokens.new_empty(shape)
                state.head_of_slot = None
                if self.is_by_head:
                    state.head_of_slot = torch.empty_like(state.positions, dtype=torch.uint8)
            target, owners = self.rows(state), state.head_of_slot
            kernels.move(source, target, heads, chosen, rooms, state.free_slot, owners)

    def compact_by(
        self, kernels: Cut, state: SlotState, rows: triton_cut.Rows, chosen: triton_cut.Chosen
    ) -> None:
        """Move the entries chosen in place; scores, positions and weights come by head; mutates."""
        slots = self.rows(state)
        source = rows._replace(keys=slots.keys, values=slots.values)
        heads = state.free_slot.shape[1] * state.free_slot.shape[2]
        kernels.move(source, slots, heads, chosen, self._rooms(state), state.free_slot)

    # --- what the host knows ----------------------------------------------------------------------

    def _num_slots(self, state: SlotState, count: int) -> int:
        """Return the slots of a row for the entries of one head."""
        is_static = self.capacity is not None and self._is_static(state)
        return self.capacity if is_static else slots_for(count, self.capacity)

    def row_slots(self, state: SlotState) -> int:
        """Return the slots of a row that heads share, of the sequence that needs most."""
        return max(sum(total + self.span for total in heads) for heads in state.totals())

    def all_slots(self, state: SlotState) -> int:
        """Return the slots of a row that has all that there may be."""
        if self.is_by_head:
            return self.row_slots(state)
        return max(map(max, state.totals())) + self.span

    def head_slots(self, state: SlotState) -> int | None:
        """Return the slots of the head that has most in a shared row; ``None`` if unknown."""
        if not self.has_all_slots:
            return None
        largest = max(map(max, state.totals())) + self.span
        return max(largest, self.reserved, self.most_slots or 0)  # of all, for some of them

    def count_entries(self, state: SlotState) -> list[list[int]]:
        """Return the entries of each sequence, and of each head where budgets differ.

        They follow from the tokens seen, as entries leave at cuts and nowhere else.
        """
        # A rule that decides once has counted a token that is not read yet.
        follows = self.rule.inputs is not Inputs.WINDOW and not self.rule.grows
        if state.has_gaps or not follows:
            return [heads[:, 0].tolist() for heads in state.counts()]
        counts = []
        sequences = zip(state.lengths(), state.phases(self.span), state.totals(), strict=True)
        for length, after_cut, totals in sequences:
            bounds = totals if self.rule.evicts else [length]
            counts.append([min(length - after_cut, bound) + after_cut for bound in bounds])
        return counts

    @staticmethod
    def _room(state: SlotState, counts: list[list[int]]) -> list[list[int]]:
        """Return how many entries below their budgets the heads of each sequence hold."""
        pairs = zip(state.totals(), counts, strict=True)
        # One total may be that of several heads.
        return [[*map(operator.sub, cycle(totals), heads)] for totals, heads in pairs]

    def most_entries(self, state: SlotState) -> int:
        """Return the entries of the head that holds most."""
        return max(map(max, self.count_entries(state)))

    # --- what steps may leave out -----------------------------------------------------------------

    def make_static(self, state: SlotState, dtype: torch.dtype) -> None:
        """Make all slots that there may be, for steps of one shape; mutates both."""
        if self.capacity is not None and state.num_slots < self.capacity:
            self._add_slots(state, dtype, self.capacity)
            if not torch.compiler.is_compiling():
                self.refresh(state, dtype)
        self.drop_tail()  # compiled steps do not count

    def begin_step(self, state: SlotState, dtype: torch.dtype, may_append: bool) -> None:
        """Count a step, and say whether it takes the tail's slots; mutates both."""
        self.count_down(state, dtype)
        if not may_append or self.take_tail(state) is None:
            self.drop_tail()

    def step_key(self, is_padded: bool) -> tuple[Any, ...]:
        """Return what a recorded step has of the plan; `begin_step` has been called.

        Every number of the host that decides what a step launches must be here.
        """
        is_full = self.is_full and not is_padded
        numbers, tail = (is_full, self.has_sinks, self.most_slots), self.tail
        if tail is None:
            return numbers
        addresses = [tensor.data_ptr() for tensor in (tail.free, tail.bias) if tensor is not None]
        return *numbers, tail.end, *addresses

    def count_down(self, state: SlotState, dtype: torch.dtype) -> None:
        """Count a step, and look after the slots where it is due; mutates both."""
        if self.steps_left == 0:
            self.refresh(state, dtype)
        if self.steps_left > 0:
            self.steps_left -= 1

    def refresh(self, state: SlotState, dtype: torch.dtype) -> None:
        """Note what steps may leave out, and make slots for them."""
        counts = self.count_entries(state)
        protected = {(budget.sink, budget.recent) for budget in state.budgets}
        self.protected = protected.pop() if len(protected) == 1 else None
        self.has_sinks = any(budget.sink for budget in state.budgets)
        self.most_slots = None
        self.most_slots = self.head_slots(state)
        # Sequences with different budgets are never full all together.
        is_even = self.rule.is_bounded and state.slot_mask is None and self.span == 1
        steps = []
        if is_even:
            steps.append(max(map(max, self._room(state, counts))))
        self.is_full = steps == [0]
        if state.head_of_slot is not None:
            steps += [] if self.has_all_slots else self._steps_by_head(state, dtype)
        elif self.capacity is None or state.num_slots < self.capacity:
            largest = max(map(max, counts))
            if state.num_slots == largest + 1:
                self._add_slots(state, dtype, slots_for(largest, self.capacity))
            if state.num_slots != self.capacity:
                steps.append(state.num_slots - largest - 1)
        self.steps_left = -1 if self.is_full else min(steps, default=-1)
        if self.span > 1:
            self.steps_to_cut = self.span - max(state.phases(self.span))
        self.looks_for_tail = True

    def compact(self, state: SlotState, scores: Tensor, indices: Tensor, is_kept: Tensor) -> None:
        """Move kept entries to the first slots of their heads, in place; mutates the state.

        Args:
            state: slots of which all or most are taken.
            scores: of the entries, in the order of `SlotState.by_head`, fp32 ``[B, H, N]``.
            indices: int64 ``[B, H, K]``, of the entries of `scores`.
            is_kept: bool ``[B, H, K]``.
        """
        batch, heads, count = indices.shape
        row = torch.arange(state.num_slots, device=state.device)
        of_head = row.expand(batch, heads, -1)
        if state.head_of_slot is not None:
            of_head = state.of_others().to(torch.uint8).argsort(dim=-1, stable=True)
        # What moves from which slot to which; beyond the last slot where nothing does.
        target = of_head[..., :count].masked_fill(~is_kept, state.num_slots)
        source = of_head.gather(-1, indices)
        rows = state.positions.shape[1]
        target, source, kept_scores = (
            tensor.reshape(batch, rows, -1)
            for tensor in (target, source, scores.gather(-1, indices))
        )
        moved = row.repeat(batch, rows, 1)
        moved = pad(moved, (0, 1)).scatter_(-1, target, source)[..., :-1]
        is_empty = torch.ones_like(pad(moved, (0, 1)), dtype=torch.bool)
        is_empty = is_empty.scatter_(-1, target, False)[..., :-1]
        for tensor in state.entry_tensors().values():
            tensor.copy_(pick(tensor, moved))
        for name in state.moving:
            if name != "scores" and (tensor := getattr(state, name)) is not None:
                tensor.copy_(pick(tensor, moved))
                tensor.masked_fill_(is_empty, state.kinds[name].empty_value(state.num_slots))
        state.scores.copy_(
            pad(torch.zeros_like(state.scores), (0, 1)).scatter_(-1, target, kept_scores)[..., :-1]
        )
        num_kept = is_kept.sum(dim=-1, keepdim=True)
        last = of_head.shape[-1] - 1
        free = of_head.gather(-1, num_kept.clamp(max=last))
        state.free_slot.copy_(free.view_as(state.free_slot))

    def _limit(self, state: SlotState) -> Tensor:
        # A cut may raise a growing budget by the whole span; one slot must still be free.
        return state.total + (self.span if self.rule.grows else self.span - 1)

    def _steps_by_head(self, state: SlotState, dtype: torch.dtype) -> list[int]:
        """Return the steps until heads need more slots; adds slots where none is left."""
        steps: list[int] = []
        counts = state.counts()
        for is_last in (False, True):
            num_slots = (~state.of_others()).sum(dim=-1, keepdim=True)
            steps = (num_slots - 1 - counts)[num_slots <= self._limit(state)].tolist()
            if 0 not in steps or is_last:
                break
            self._add_slots(state, dtype)
        return steps

    def take_tail(self, state: SlotState) -> Tail | None:
        """Return the slots that a step fills, evicting nothing; `None` where it must look.

        A step that does not use it must call `drop_tail`. Mutates the plan.
        """
        is_replaced = self.tail is not None and not self.tail.is_of(state)  # by beam search, say
        if self.looks_for_tail or is_replaced:
            former = None if is_replaced else self.tail
            self.tail, self.looks_for_tail = self._find_tail(state, former), False
        return self.tail if self.tail is not None and self.tail.steps > 0 else None

    def drop_tail(self) -> None:
        """Forget the tail, as a step takes other slots; mutates the plan."""
        self.tail, self.looks_for_tail = None, False

    def _find_tail(self, state: SlotState, former: Tail | None) -> Tail | None:
        """Look for the tail; the scores of slots without an entry become 0; mutates the state."""
        has_mask = self.rule.is_bounded and state.slot_mask is not None
        if self.is_full or state.ranks is not None or self.storage.is_packed or has_mask:
            return None
        with ordinary_tensors():
            tail = Tail.of(state, former)
            if tail is None:
                return None
            if self.span == 1:
                tail.steps -= 1  # one slot is free after each step
                if self.rule.is_bounded:
                    rooms = self._room(state, self.count_entries(state))
                    tail.steps = min(tail.steps, min(map(min, rooms)))
            state.scores.masked_fill_(state.positions < 0, 0.0)
        return tail

    def _add_slots(self, state: SlotState, dtype: torch.dtype, num_slots: int = 0) -> None:
        """Grow to ``num_slots``; shared rows to the capacity or by some slots for each head."""
        if state.head_of_slot is None:
            state.resize(num_slots)
            state.slot_mask = self.slots_within_budget(state)
            return
        state.unshare(self.head_slots(state))
        order = (state.positions < 0).to(torch.uint8).argsort(dim=-1, stable=True)
        is_kept = state.positions.gather(-1, order) >= 0
        key = self.storage.keys.read(state.keys, dtype, state.key_transform)
        value = self.storage.values.read(state.values, dtype)
        entries = BlockEntries(
            state.num_slots, key, value, state.scores, state.positions, key, key, value
        )
        full = self._is_static(state) or num_slots == self.capacity
        self._share(state, entries, order, is_kept, full)

    def slots_within_budget(self, state: SlotState) -> Tensor | None:
        """Mark at most ``K + 1`` slots of each sequence; ``None`` if all have one budget."""
        # Shared slots belong to heads; where spans are longer than a token, steps evict nothing.
        if not self.rule.is_bounded or state.head_of_slot is not None or self.span > 1:
            return None
        if all(budget.total + 1 == self.capacity for budget in state.budgets):
            return None
        is_taken = (state.positions >= 0).scatter(-1, state.free_slot, True)
        # Of the empty slots, as many stay open as the sequence's budget leaves.
        rank = (~is_taken).cumsum(dim=-1)
        return is_taken | (rank <= state.total + 1 - is_taken.sum(dim=-1, keepdim=True))

    def _is_static(self, state: SlotState) -> bool:
        is_static = state.device.type == "cuda" or torch.compiler.is_compiling()
        return is_static and self.rule.is_bounded


def _empty_rows(source: triton_cut.Rows, rows: int, num_slots: int) -> triton_cut.Rows:
    """Allocate slots for entries."""
    return source._replace(**{
        name: tensor.new_empty(len(tensor), rows, num_slots, *tensor.shape[3:])
        for name, tensor in source._asdict().items() if tensor is not None
    })  # fmt: skip
