"""A layer of slots: where its entries are, and how a single token passes through them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from h2okv.cache.block import Block, BlockEntries
from h2okv.cache.drafting import Plan
from h2okv.cache.layer import CacheLayer
from h2okv.cache.rope import ranks_of, rotate_to_ranks
from h2okv.cache.slot_state import SlotState, ordinary_tensors
from h2okv.cache.slots import SlotPlan
from h2okv.cache.spans import to_device
from h2okv.ops.append import Appended, append_step
from h2okv.ops.attention import blockwise_attention_with_scores
from h2okv.ops.choice import CutRules, choose_all
from h2okv.ops.decode import QueryRing, StepNumbers, StepRules, decode_step
from h2okv.ops.dispatch import Cut, Operations, operations
from h2okv.ops.reference import Visibility
from h2okv.policy import Inputs

_fields_of = attrgetter(*SlotState.kinds)


def _is_still(former: Any, value: Any) -> bool:
    """Tell whether a field has its former object; of tensors there is a weak reference."""
    return (former() if type(former) is ref else former) is value


class SlotLayer(CacheLayer):
    """Keys, values, scores and positions in slots, of which one is always free.

    The order of the slots means nothing. A decode step writes into the free slot, attends over
    all slots, adds to the scores and finds the slot to free next; nothing is moved or sorted. How
    many slots there are is up to the `SlotPlan`. When positions roll, keys are un-rotated, pairs
    next to each other.
    """

    def _forget(self) -> None:
        super()._forget()
        self._placed: tuple[list[Any], tuple[int, ...]] | None = None  # of the last `step_key`
        self.is_in_order = False
        self._is_dense = False  # whether every slot has an entry, between the blocks of a forward
        self.slots = SlotPlan(self.rule, self.storage, self.head_budgets is not None, self.span)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled, without addresses."""
        return super().__getstate__() | {"_placed": None}

    def move(self, device: torch.device) -> None:
        super().move(device)
        self.slots.operations = None
        self.slots.drop_tail()

    # --- a block ----------------------------------------------------------------------------------

    def _place(self, block: Block) -> BlockEntries:
        state = self.state
        key, value = block.key, block.value
        scores, positions = self._block_entries(block)
        if state.num_slots and (kernels := self.cut_kernels(positions)) is not None:
            rows, is_entry = self.slots.join(kernels, state, block, scores, positions)
            past = rows.positions.shape[2] - block.length
            states = block.query, rows.keys, rows.values
            return BlockEntries(past, *rows[:4], *states, is_entry)
        if state.head_of_slot is not None:
            state.unshare(self.slots.head_slots(state))
        past = state.num_slots
        if past:
            cached_key = self.storage.keys.read(state.keys, self.dtype, state.key_transform)
            key = torch.cat([cached_key, key], dim=2)
            value = torch.cat([self.storage.values.read(state.values, self.dtype), value], dim=2)
            scores = torch.cat([state.scores, scores], dim=2)
            positions = torch.cat([state.positions, positions], dim=2)
        attended_key, attended_value = self._as_attended(key, value, past, block.real)
        query = block.query
        if self.rotations.rolling is not None:
            query, attended_key = self._rotate_block(query, attended_key, positions, past)
        is_entry = None
        if block.real is not None or (past > 0 and not self._is_dense):
            is_entry = positions >= 0
        return BlockEntries(
            past, key, value, scores, positions, query, attended_key, attended_value, is_entry
        )

    def _rotate_block(
        self, query: Tensor, key: Tensor, positions: Tensor, past: int
    ) -> tuple[Tensor, Tensor]:
        """Rotate a block's queries and all keys ``[B, H, past + T, D]`` to their ranks."""
        assert self.rotations.rolling is not None
        is_entry = positions >= 0
        num_cached = is_entry[..., :past].sum(dim=-1, keepdim=True)
        ranks = num_cached + is_entry[..., past:].cumsum(dim=-1) - 1
        # All heads of a sequence have the same number of entries.
        query_ranks = ranks[:, :1]
        if past:
            ranks = torch.cat([self.state.ranks, ranks], dim=-1)
        factors = self.rotations.rolling.of_ranks(self._rank_limit(query.shape[2]))
        return rotate_to_ranks(query, query_ranks, factors), rotate_to_ranks(key, ranks, factors)

    def _rank_limit(self, length: int) -> int:
        if not self.holds_entries:
            return length
        if length == 1:
            # Not by the budgets: the sequence of a larger one may have been taken out.
            return max(self.slots.capacity or 0, self.state.num_slots)
        return self.slots.most_entries(self.state) + length

    def _attend(self, block: Block, entries: BlockEntries) -> tuple[Tensor, Tensor]:
        self._choose_operations(block.query)
        assert self.slots.operations is not None
        attend: Callable[..., tuple[Tensor, Any]] = self.slots.operations.attend
        if block.spec.reach is not None:  # the kernels are causal
            attend = blockwise_attention_with_scores
        visibility = Visibility(entries.past, entries.is_entry, block.real)
        states = query, *_ = entries.query, entries.attended_key, entries.attended_value
        arguments = *states, visibility, block.spec, self._query_weights(block)
        if self._shared_attention is not None:
            return self._shared_attention(attend, *arguments)
        options = {} if self._needs_sums(block) else {"needs_sums": False}
        output, sums = attend(*arguments, **options)
        if sums is None:
            sums = self.forward.zeros(entries.positions.shape, query.device)
        return output, sums

    def _needs_sums(self, block: Block) -> bool:
        if self.scores_spans and not any(self.whole_blocks(block)):
            return False
        if block.length == 1:
            return True
        if self.rule.effective_inputs is Inputs.QUERIES:
            # A padded sequence's only token adds its probabilities.
            return block.real is not None
        return self.rule.effective_inputs is not Inputs.KEYS

    def _attend_from_behind(self, block: Block, entries: BlockEntries) -> Tensor:
        if self._shared_attention is None:
            return super()._attend_from_behind(block, entries)
        return self._shared_attention.once(
            lambda: super(SlotLayer, self)._attend_from_behind(block, entries)
        )

    def _expect(self, query: Tensor, *arguments: Any) -> Tensor:
        # None of a state from a file. Queries of a span are of fewer heads than a step's.
        return self._operations(query).expect(query, *arguments)

    def _choose_operations(self, query: Tensor) -> None:
        """Choose the operations of all tokens until the next block; mutates the plan."""
        self.slots.operations = None
        self.slots.operations = self._operations(query, query.shape[1] // self.num_kv_heads)

    def _operations(self, states: Tensor, groups: int = 1) -> Operations:
        """Return the operations chosen, or those of a state from a file."""
        if self.slots.operations is not None:
            return self.slots.operations
        is_packed = self.storage.is_packed or not self.state.has_values
        return operations(
            states.device, self.dtype, self.key_size, self.value_size, groups, is_packed,
            self.head_budgets is not None,
        )  # fmt: skip

    def cut_kernels(self, positions: Tensor) -> Cut | None:
        """Return the kernels of a cut of entries ``[B, H, N]``, where they know all of a slot."""
        is_known = self.rotations.rolling is None and not torch.compiler.is_compiling()
        if self.head_budgets is not None:
            is_known &= self.slots.has_rooms(self.state)
        return self._operations(positions).cut if is_known else None

    def select(
        self,
        kernels: Cut,
        entries: BlockEntries,
        weights: Tensor | None,
        total: Tensor,
        limit: int,
        in_place: bool = False,
    ) -> Any:
        """Choose the entries that stay by a kernel, as `choose`, with the weights of the values.

        Arguments as of `choose` and `h2okv.ops.triton_cut.select`, which says what it returns.
        """
        rule, state, scores, positions = self.rule, self.state, entries.scores, entries.positions
        priority, factors = scores, weights
        if not rule.ranks_by_products:
            priority = self._rank(scores, positions, self.newest(), weights, entries.key)
            factors = None
        seen, written = state.num_real_tokens, self._written()
        rules = CutRules(seen, state.sink, state.recent, total, written)
        return kernels.select(priority, factors, scores, positions, rules, limit, in_place)

    def _evict(self, entries: BlockEntries) -> None:
        state, slots = self.state, self.slots
        self.prompt.was_partial = self.prompt.is_partial
        if self.prompt.is_partial:  # more of the block is to come: nothing is evicted yet
            with ordinary_tensors():
                state.keys, state.values = entries.key.clone(), entries.value.clone()
                state.head_of_slot = None
                for name, tensor in entries.metadata(state).items():
                    setattr(state, name, tensor.clone())
            return
        positions, total = entries.positions, state.total
        limit = max(map(max, state.totals()))
        slots.capacity = limit + slots.span if self.rule.is_bounded else None
        if not self.rule.evicts:
            total = (positions >= 0).sum(dim=-1, keepdim=True)
            limit = int(total.max()) if state.has_gaps else slots.most_entries(state)
        elif self.span > 1:
            total = self.spans.totals(state, positions, self.is_late)
            state.has_gaps |= self.is_late is not None
            is_known = self.rule.is_bounded and not state.has_gaps
            limit = slots.most_entries(state) if is_known else int(total.max())
        kernels = self.cut_kernels(positions)
        if kernels is None and self._keeps_all(positions.shape[2]):
            all_entries = choose_all(positions, entries.is_entry is not None, limit)
            slots.store(state, entries, *all_entries, self.is_inner)
        elif kernels is None:
            slots.store(state, entries, *self.choose(entries, total, limit), self.is_inner)
        else:
            weights = self.rule.value_weights(entries.value) if self.rule.weighs_values else None
            chosen = self.select(kernels, entries, weights, total, limit)
            slots.store_by(kernels, state, entries, weights, chosen, limit)
        if self.rotations.rolling is not None:
            with ordinary_tensors():
                state.ranks = ranks_of(state.positions)
                self.rotations.make_tables(self._rank_limit(1))
        self.is_in_order, self._is_dense = self.is_inner and kernels is None, False
        if self.is_inner:  # no step follows, which would need the rest
            state.slot_mask = None
            if self.is_in_order and not state.has_gaps:
                counts = {n for heads in slots.count_entries(state) for n in heads}
                self._is_dense = counts == {state.num_slots}
            return
        state.slot_mask = slots.slots_within_budget(state)
        slots.refresh(state, self.dtype)
        # CUDA graphs must be told that steps write where they read.
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            for tensor in (*state.tensors().values(), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)

    def _keeps_all(self, count: int) -> bool:
        """Tell whether no head has to evict any of that many entries after a block."""
        if self.span > 1 and not any(self.spans.ended(self.state, self.is_late)):
            return True
        return not self.rule.evicts or min(map(min, self.state.totals())) >= count

    # --- a single token ---------------------------------------------------------------------------

    def _takes_step(self, block: Block) -> bool:
        # A budget that grows after each token needs a slot more now and then, as blocks find them.
        may_evict = not (self.rule.grows and self.span == 1)
        return block.length == 1 and self.holds_entries and self.prompt.is_read and may_evict

    def _takes_plain_step(self) -> bool:
        if self.log is not None or self.departures is not None or not self.holds_budgets:
            return False
        needs_more = self.rotations.rolling is not None or self.rule.inputs is Inputs.WINDOW
        needs_more |= self.rule.grows and self.span == 1
        return not needs_more and self.prompt.is_read and not torch.compiler.is_compiling()

    def _read_token(self, block: Block) -> Tensor:
        state, slots = self.state, self.slots
        run, is_compiling = self._step_operation(block.query), torch.compiler.is_compiling()
        if is_compiling:  # a count that changes would compile the step again
            slots.make_static(state, self.dtype)
        elif not self.forward.leaves_host:
            self.begin_step(block.real is not None)
        if slots.changes_scores:
            state.scores.copy_(self._decayed(state.scores, block.counts()))
        if slots.weighs_values and not slots.weighs_norms:
            assert state.value_weights is not None
            weights = self.rule.value_weights(self.storage.values.round(block.value))
            state.value_weights.scatter_(-1, state.free_slot, weights.view_as(state.free_slot))
        ring = None
        if self.scores_spans:
            ring = self.spans.ring(state, block)
        if slots.tail is not None:
            numbers = self._numbers(block)
            weights = state.value_weights if slots.weighs_norms else None
            rules = StepRules(
                block.spec, state.recent, adds=slots.adds, numbers=numbers, weights=weights,
                ring=ring, columns=self.cumulative_length,
            )  # fmt: skip
            output = append_step(block.query, block.key, block.value, state, rules, slots.tail)
            step = Appended(block.query, block.key, state, rules, slots.tail)
            self.forward.add_step(step, self._ends_span())
        else:
            output = self._evicting_step(run, block, ring)
            if run is decode_step:  # kernels count by themselves
                self.cumulative_length += 1
        if is_compiling:
            state.note_count(None)
            self.note_columns(1)
        elif not self.forward.leaves_host and self.note_step(self._lengths(block)):
            self._count_to_cut()
        return output

    def begin_step(self, is_padded: bool) -> None:
        """Do what the host does before a step, for sequences that may get padding; mutates."""
        operations = self.slots.operations
        is_plain = operations is not None and operations.step is decode_step
        may_append = is_plain and self.log is None and not is_padded
        self.slots.begin_step(self.state, self.dtype, may_append)

    def step_key(self, is_padded: bool) -> tuple[Any, ...]:
        """Return the layer's part of a recorded step's key: what its launches depend on."""
        return *self.slots.step_key(is_padded), *self.addresses()

    def addresses(self) -> tuple[int, ...]:
        """Return the number of slots, and where everything is."""
        state, tables = self.state, self.rotations.tables or ()
        now = (*_fields_of(state), self.cumulative_length, *tables)
        # Asking for each address would take longer than all else that the host does for a step.
        if self._placed is None or not all(map(_is_still, self._placed[0], now)):
            tensors = [*state.tensors().values(), self.cumulative_length, *tables]
            addresses = state.num_slots, *(tensor.data_ptr() for tensor in tensors)
            # Weakly, as entries that move shall not stay too; packed ones are asked each time.
            former = [ref(value) if torch.is_tensor(value) else value for value in now]
            self._placed = former, addresses
        return self._placed[1]

    def _step_operation(self, query: Tensor) -> Callable[..., Tensor]:
        # On a CPU inductor makes more of operations that it sees than of a package of its own.
        if torch.compiler.is_compiling() and not query.is_cuda:
            return decode_step
        if self.slots.operations is None:
            self._choose_operations(query)
        assert self.slots.operations is not None
        return self.slots.operations.step

    def _evicting_step(
        self, run: Callable[..., Tensor], block: Block, ring: QueryRing | None
    ) -> Tensor:
        """Run a token through slots in any order, evicting where spans are of one token."""
        query, key, value, real, *_ = block
        state, slots, rotations = self.state, self.slots, self.rotations
        if rotations.rolling is not None and rotations.tables is None:
            rotations.make_tables(self._rank_limit(1))
        # A ranking by the scores and the values' norms is what a kernel can do.
        rank = None if slots.ranks_by_sums or self.rule.inputs is Inputs.WINDOW else self._rank
        sink = state.sink if slots.has_sinks else None
        rules = StepRules(
            block.spec, state.recent, sink, rotations.tables, rank, slots.is_full,
            evicts=self.span == 1, adds=slots.adds, numbers=self._numbers(block),
            weights=state.value_weights if slots.weighs_norms else None, ring=ring,
            most_slots=slots.most_slots,
            columns=None if run is decode_step else self.cumulative_length,
        )  # fmt: skip
        return run(query, key, value, state, rules, real)

    def _numbers(self, block: Block) -> StepNumbers | None:
        """Return the host's numbers for a step; ``None`` if sequences differ, or on a GPU."""
        # A compiled step would be compiled again for each number.
        if block.real is not None or torch.compiler.is_compiling() or not block.query.is_cpu:
            return None
        lengths, protected = self.state.known_lengths, self.slots.protected
        if not lengths or protected is None or self.rule.inputs is Inputs.WINDOW:
            return None
        length, (sink, recent) = lengths[0], protected
        if len(lengths) > 1 and lengths.count(length) < len(lengths):
            return None
        return StepNumbers(length, sink or None, recent)

    def plan(self) -> Plan:
        return self.slots.counters()

    def restore_plan(self, plan: Plan) -> None:
        vars(self.slots).update(plan)

    def note_step(self, counts: Sequence[int] | None = None) -> bool:
        """Do what the host does after a step; tell whether it may have ended a span; mutates."""
        self.is_placed = False
        self.state.note_count(counts)
        self.note_columns(1)
        if self.slots.tail is not None:
            self.slots.tail.note_step()
        self.slots.steps_to_cut -= 1
        return self.span > 1 and self.slots.steps_to_cut <= 0  # padding can only delay the end

    def _ends_span(self) -> bool:
        """Tell whether a cut may follow the step, for which the slots must be up to date."""
        return self.span > 1 and self.slots.steps_to_cut <= 1 and not self.forward.leaves_host

    def _count_to_cut(self) -> None:
        if ended := self.ended():
            self.cut(ended)
        self.note_cut(ended)

    def ended(self) -> tuple[int, ...]:
        """Return the sequences whose span a step has ended."""
        state, is_over = self.state, self.spans.ended(self.state)
        scored = state.scored_lengths or (None,) * self.batch_size
        rows = enumerate(zip(is_over, state.lengths(), scored, strict=True))
        return tuple(row for row, (over, now, before) in rows if over and now != before)

    def cut(
        self, ended: tuple[int, ...], index: Any = None, num_rows: int = 0, stores: bool = True
    ) -> SlotState:
        """Evict from sequences whose span has `ended`, and return them; `note_cut` follows.

        A cut that is recorded reads them from an index, int64 ``[n]``, in a pool of `num_rows`.
        Where it does not store them, only copies change.
        """
        self.grow()
        rows = former = self.state
        if is_apart := num_rows > 0 or len(ended) < self.batch_size or not stores:
            rows = former.with_rows(num_rows) if num_rows else former
            if index is None:
                key = "ended", former.device, ended
                index = self.forward.shared(key, lambda: to_device(ended, former))
            self.state = rows.index_select(index, ended)
        else:  # a copy of what the host knows: tensors change in place
            self.state = copy.copy(former)
        try:
            self.is_late = None
            self._evict_ended()
        finally:
            self.state, state = former, self.state
        if is_apart and stores:
            rows.store_cut(index, state)
        return state

    def note_cut(self, ended: tuple[int, ...], like: SlotLayer | None = None) -> None:
        """Do what the host does after `cut`, or as another layer with all slots did; mutates."""
        state, slots = self.state, self.slots
        if like is not None:
            state.scored_lengths = like.state.scored_lengths
            slots.steps_to_cut, slots.looks_for_tail = like.slots.steps_to_cut, True
            return
        if self.scores_spans:
            self.spans.note_scored(state, ended)
        slots.refresh(state, self.dtype)

    @property
    def is_recordable(self) -> bool:
        """Whether its options let cuts, and blocks that end with one, be recorded."""
        rule = self.rule
        is_known = rule.ranks_by_products and not (rule.grows or self.storage.is_packed)
        return is_known and self.latent is None and not self.position_rule.rolls

    def cut_key(self) -> tuple[Any, ...] | None:
        """Return the layer's part of a recorded cut's key; ``None`` if it runs launch by launch."""
        state, slots = self.state, self.slots
        is_known = self.is_recordable and slots.steps_left < 0
        is_known &= not self.scores_spans or state.scored_lengths is not None
        if not is_known or not (state.num_slots == slots.capacity or slots.has_all_slots):
            return None
        return slots.most_slots, slots.operations, *self.addresses()

    def _evict_ended(self) -> None:
        """Evict from all sequences, whose spans a step has ended, in place."""
        state, slots, rows = self.state, self.slots, None
        kernels = self.cut_kernels(state.positions)
        if kernels is None:
            fields = "keys", "values", "scores", "positions"
            key, value, scores, positions = state.by_head(
                *fields, num_slots=slots.head_slots(state)
            )
            key = self.storage.keys.read(key, self.dtype, state.key_transform)
            value = self.storage.values.read(value, self.dtype)
        else:
            self._weigh_values()
            rows = slots.by_head(kernels, state)
            key, value, scores, positions, _ = rows
        past, is_entry = positions.shape[2], positions >= 0
        entries = BlockEntries(past, key, value, scores, positions, key, key, value, is_entry)
        if self.scores_spans:
            if self.rotations.rolling is not None:
                factors = self.rotations.rolling.of_ranks(past)
                entries.attended_key = rotate_to_ranks(key, ranks_of(positions), factors)
            entries.scores = self._score_ended(entries)
        total, limit = state.total, past
        if kernels is None:
            slots.compact(state, entries.scores, *self.choose(entries, total, limit))
            self._weigh_values()
            if state.ranks is not None:
                state.ranks.copy_(ranks_of(state.positions))
        else:
            chosen = self.select(kernels, entries, rows.weights, total, limit, in_place=True)
            slots.compact_by(kernels, state, rows._replace(scores=entries.scores), chosen)
        if self.ends_forward or self.forward.num_layers == 1:
            self.forward.forget_shared()

    def _weigh_values(self) -> None:
        """Weigh the values of all slots again; mutates the state."""
        if self.state.value_weights is not None:
            values = self.storage.values.read(self.state.values, self.dtype)
            self.state.value_weights.copy_(self.rule.value_weights(values))

    def drop(self, spans: Sequence[tuple[int, int]]) -> None:
        """Take the entries at spans of positions out; mutates the layer."""
        state, slots = self.state, self.slots
        scores, positions = state.by_head("scores", "positions")
        is_kept = positions >= 0
        for start, stop in spans:
            is_kept = is_kept & ((positions < start) | (positions >= stop))
        with ordinary_tensors():
            order = (~is_kept).to(torch.uint8).argsort(dim=-1, stable=True)
            slots.compact(state, scores, order, is_kept.gather(-1, order))
            self._weigh_values()
            state.has_gaps = True
            state.slot_mask = slots.slots_within_budget(state)
            slots.refresh(state, self.dtype)

    @property
    def is_ready(self) -> bool:
        """Whether decode steps can run, as a block has set up what they need."""
        is_known = self.slots.operations is not None and self.module is not None
        is_known &= self.rotations.rolling is None or self.rotations.tables is not None
        is_plain = self.log is None and self.departures is None and self.prompt.is_read
        return is_known and self.holds_entries and self.rule.is_bounded and is_plain

    def join(self, other: SlotLayer) -> None:
        """Append another layer's sequences; mutates this layer and consumes the other."""
        state, slots = self.state, self.slots
        state.slot_mask = other.state.slot_mask = None
        state.cat(other.state)
        self.cumulative_length = torch.maximum(self.cumulative_length, other.cumulative_length)
        self.num_columns = None
        if slots.capacity is not None and other.slots.capacity is not None:
            slots.capacity = max(slots.capacity, other.slots.capacity, state.num_slots)
            state.slot_mask = slots.slots_within_budget(state)
        slots.has_all_slots &= other.slots.has_all_slots
        self.rotations.tables = None  # of the former number of slots
        slots.refresh(state, self.dtype)
        other.reset()

    def load_state(self, state: SlotState, seen: Tensor, weights: str | None) -> None:
        super().load_state(state, seen, weights)
        slots = self.slots
        if self.rule.is_bounded:
            largest = max(budget.total for budget in state.budgets)
            slots.capacity = max(largest + slots.span, state.num_slots)
            if state.head_of_slot is not None:
                slots.capacity = slots.row_slots(state)
                is_whole = state.batch_size == 1 and state.num_slots == slots.capacity
                slots.has_all_slots = is_whole
            state.slot_mask = slots.slots_within_budget(state)
        slots.refresh(state, self.dtype)
