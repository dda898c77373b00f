"""A pool of slots that sequences join and leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2okv.budget import Budget, TokenBudget
from h2okv.cache.h2o_cache import H2OCache
from h2okv.cache.linear_states import LinearStates, continues_prompts, has_fixed_state
from h2okv.cache.rope import PositionRule
from h2okv.cache.slot_layer import SlotLayer
from h2okv.cache.slot_state import SlotState, ordinary_tensors
from h2okv.policy import get_rule


def is_window_layer(layer: object, layer_idx: int, config: PreTrainedConfig) -> bool:
    """Tell whether a layer attends to a window of the newest tokens only."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None)
    return (
        type(layer) is DynamicSlidingWindowLayer
        and layer.sliding_window > 1
        and kinds is not None
        and kinds[layer_idx] == "sliding_attention"
    )


def window_slots(
    layer: DynamicSlidingWindowLayer, layer_idx: int, sequence: int, seen: int
) -> SlotLayer:
    """Convert a sliding layer's entries of one sequence into slots, oldest first."""
    window, num_held = layer.sliding_window, min(seen, layer.keys.shape[2])
    budget, rule = Budget(heavy=0, recent=window - 1), get_rule("recent")
    slot_layer = SlotLayer(layer_idx, budget, rule, PositionRule())
    slot_layer.window = slot_layer.slots.capacity = window
    with ordinary_tensors():
        slot_layer.lazy_initialization(layer.keys, layer.values)
        slot_layer.count_columns(seen)
        state: Any = slot_layer.state.like(1, window)
        slot_layer.state = state
        slot_layer._set_budgets([seen])
        for slots, tensor in ((state.keys, layer.keys), (state.values, layer.values)):
            slots[:, :, :num_held] = tensor[sequence, :, tensor.shape[2] - num_held :]
        state.positions[..., :num_held] = torch.arange(seen - num_held, seen, device=state.device)
        state.free_slot.fill_(min(num_held, window - 1))
        state.num_real_tokens.fill_(seen)
    return slot_layer


def _fill_window(layer: DynamicSlidingWindowLayer, state: SlotState, seen: int) -> None:
    """Fill an empty sliding layer with the newest tokens of a sequence's slots, in order."""
    order = state.positions[0, 0].argsort()
    order = order[state.positions[0, 0][order] > max(seen - layer.sliding_window, -1)]
    keys, values = (state.stored(name)[:, :, order] for name in ("keys", "values"))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, seen


class SlotBookkeeping:
    """The budget and the entries of each sequence, for layers with equal budgets.

    Heads with equal budgets have one count for all; otherwise they share a row of slots, and each
    has its count.
    """

    def __init__(self, capacity: float, sharing_heads: int | None = None, span: int = 1) -> None:
        self.capacity = capacity  # K of the largest sequence; of heads that share, their mean
        self._sharing_heads, self.span = sharing_heads, span
        self.budgets: list[TokenBudget] = []
        self._phases: list[int] = []  # tokens of its span that each sequence has read
        self._totals: list[list[int]] = []
        self._room: list[list[int]] = []

    @property
    def num_slots(self) -> int:
        """Slots of the largest sequence's row."""
        return round((self._sharing_heads or 1) * (self.capacity + self.span))

    def admit(self, budget: TokenBudget, totals: list[int], counts: list[int], phase: int) -> None:
        """Register a sequence: its budget and its entries, each a list by head."""
        self._phases.append(phase % self.span)
        assert sum(totals) + len(totals) <= self.num_slots, "the engine refuses larger ones"
        self.budgets.append(budget)
        self._totals.append(totals)
        self._room.append([total - count for total, count in zip(totals, counts, strict=True)])

    def release(self, index: int) -> None:
        lists: tuple[list[Any], ...] = (self.budgets, self._totals, self._room, self._phases)
        for values in lists:
            values[index] = values[-1]
            del values[-1]

    def count_step(self, rows: Sequence[int]) -> int:
        """Return how many entries a step evicts, over all heads of the sequences that take it."""
        if self.span > 1:
            return self._count_span_step(rows)
        full = sum(self._room[row].count(0) for row in rows)
        for row in rows:
            self._room[row] = [max(room - 1, 0) for room in self._room[row]]
        return full

    def _count_span_step(self, rows: Sequence[int]) -> int:
        evicted = 0
        for row in rows:
            rooms = self._room[row]
            self._phases[row] = (self._phases[row] + 1) % self.span
            rooms[:] = [room - 1 for room in rooms]  # below zero before the end of a span
            if self._phases[row] == 0:
                evicted -= sum(min(room, 0) for room in rooms)
                rooms[:] = [max(room, 0) for room in rooms]
        return evicted

    @property
    def num_held(self) -> int:
        return sum(map(sum, self._totals)) - sum(map(sum, self._room))

    @property
    def fills_all_slots(self) -> bool:
        """Whether steps need no slot mask, as every slot is within its sequence's budget."""
        if self._sharing_heads is not None or self.span > 1:
            return True
        return all(budget.total == self.capacity for budget in self.budgets)

    def set_flags(self, layer: SlotLayer) -> None:
        """Set which checks a layer's steps can skip; mutates the layer."""
        left, is_even = max(map(max, self._room)), self.fills_all_slots
        slots = layer.slots
        slots.steps_to_cut = self.span - max(self._phases)
        is_even = is_even and self.span == 1
        slots.is_full, slots.looks_for_tail = is_even and left == 0, True
        slots.steps_left = left if is_even and left else -1
        slots.most_slots = max(map(max, self._totals)) + self.span
        slots.protect(self.budgets)


class SlotPool:
    """Slots for up to `max_num_seqs` sequences; in a layer the same number for each.

    ``capacities`` are the most entries of a sequence, for each layer that evicts by H2O; the mean
    of its heads where these hold different numbers.

    Sequences in use are the first ones, without gaps: a decode step runs on a view of these, and
    when one is released the last one takes its place. A pool that grows begins with slots for one
    sequence, and doubles them whenever all are in use. Shapes, dtype and devices are read off a
    cache that the model has written to, so that each rank of a model in parts holds its own heads.
    """

    def __init__(
        self, like: H2OCache, max_num_seqs: int, capacities: Sequence[float], grows: bool = False
    ) -> None:
        # What the model gets for a decode step of the sequences in use; mutated by the model.
        self.cache = like.fork(1)
        self.max_num_seqs = max_num_seqs
        self._num_rows = num_rows = 1 if grows else max_num_seqs  # sequences that have slots
        layers: list[Any] = self.cache.layers
        self._linear = [LinearStates(layer, num_rows) for layer in _linear_layers(self.cache)]
        self.slot_layers = [layer for layer, _ in _as_slots(self.cache, 0)]
        for layer in self.slot_layers:
            layers[layer.layer_idx] = layer
        # Layers with one window share their books, and so do those of H2O, unless each has a budget
        # of its pooled; a kind is named by its first layer.
        has_own = like.cache_config.layer_budgets is not None
        kinds: dict[tuple[int | None, int], int] = {}
        self._kinds = [
            kinds.setdefault((pooled.window, has_own and pooled.window is None and index), index)
            for index, pooled in enumerate(self.slot_layers)
        ]
        sizes = iter(capacities)
        largest = [
            next(sizes) if pooled.window is None else pooled.window - 1
            for pooled in self.slot_layers
        ]
        self._books = {}
        for index in kinds.values():
            heads = self.slot_layers[index].head_budgets
            sharing_heads = None if heads is None else len(heads)
            span = self.slot_layers[index].slots.span
            self._books[index] = SlotBookkeeping(largest[index], sharing_heads, span)
        self._num_seen: list[int] = []
        self._span_starts: list[int] = []  # tokens before each sequence's first span
        self._states = []
        # Slots within each sequence's budget, bool [B, H, S], for layers of one kind.
        self._masks: dict[tuple[torch.device, int, int], Tensor] = {}
        self.num_heads = 0  # KV heads of all layers that evict by H2O
        for kind, layer in zip(self._kinds, self.slot_layers, strict=True):
            layer.slots.capacity = self._books[kind].num_slots
            layer.rotations.tables = None  # of as many ranks as the cache that this one is like
            self._states.append(layer.state.like(num_rows, layer.slots.capacity))
            if layer.window is None:
                self.num_heads += layer.num_kv_heads
            if layer.window is None and layer.head_budgets is None and layer.slots.span == 1:
                shape = (num_rows, layer.num_kv_heads, layer.slots.capacity)
                with ordinary_tensors():
                    mask = torch.zeros(shape, dtype=torch.bool, device=layer.device)
                self._masks[layer.device, layer.num_kv_heads, kind] = mask

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that hold an entry."""
        total = 0.0
        for kind, state in zip(self._kinds, self._states, strict=True):
            books = self._books[kind]
            slots = self._num_rows * books.num_slots
            total += books.num_held / slots * sum(t.nbytes for t in state.tensors().values())
        return int(total) + len(self._num_seen) * self.linear_bytes

    @property
    def linear_bytes(self) -> int:
        """Bytes of one sequence's states in linear layers."""
        return sum(t.nbytes for states in self._linear for t in states.tensors) // self._num_rows

    def _tensors(self) -> list[Tensor]:
        states = [tensor for state in self._states for tensor in state.tensors().values()]
        states += (tensor for linear in self._linear for tensor in linear.tensors)
        return [*states, *self._masks.values()]

    @property
    def full_bytes(self) -> int:
        """Bytes of keys, values and states that a full cache would hold for the same tokens."""
        return sum(map(self.full_bytes_of, list(self._num_seen)))

    def full_bytes_of(self, length: int) -> int:
        total = self.linear_bytes
        for layer in self.slot_layers:
            count = length if layer.window is None else min(length, layer.window - 1)
            total += count * layer.num_kv_heads * layer.entry_bytes
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that are allocated."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence's slots."""
        return self.nbytes // self._num_rows

    def admit(self, source: H2OCache, sequence: int = 0) -> int:
        """Copy a sequence of a cache into free slots; returns its place."""
        layers, row = _as_slots(source, sequence), len(self._num_seen)
        for layer, _ in layers:
            if layer.head_budgets is not None:  # whose slots cannot be added one by one
                layer.slots.make_static(layer.state, layer.dtype)
        assert row < self.max_num_seqs, "the scheduler counts them"
        if row == self._num_rows:
            self._grow(min(2 * row, self.max_num_seqs))
        firsts = [(layers[kind][0].state, layers[kind][1]) for kind in self._books]
        on_device = [number[i, :, 0] for s, i in firsts for number in (s.total, s.counts())]
        sizes = [len(numbers) for numbers in on_device]
        on_host = torch.cat([numbers.to(on_device[0].device) for numbers in on_device]).cpu()
        lists = iter(numbers.tolist() for numbers in on_host.split(sizes))  # the host waits once
        for books, (state, index) in zip(self._books.values(), firsts, strict=True):
            totals, counts = next(lists), next(lists)
            seen = state.lengths()[index]
            start = state.span_starts[index] if state.span_starts else 0
            books.admit(state.budgets[index], totals, counts[: len(totals)], seen - start)
        for pool_layer, (layer, index), state in zip(
            self.slot_layers, layers, self._states, strict=True
        ):
            state.copy_sequence(row, layer.state, index)
            pool_layer.writer = layer.writer
            pool_layer.rotations.follow(layer.rotations)
        for states, linear in zip(self._linear, _linear_layers(source), strict=True):
            states.admit(row, linear, sequence)
        for (_, _, kind), mask in self._masks.items():
            total = self._books[kind].budgets[row].total
            mask[row] = torch.arange(mask.shape[2], device=mask.device) <= total
        self._num_seen.append(seen)
        self._span_starts.append(start)
        self._show()
        return row

    def _grow(self, num_rows: int) -> None:
        """Allocate slots for more sequences, one tensor after the other; mutates the pool."""

        def grow(tensor: Tensor) -> Tensor:
            # Whatever a new row holds, `admit` writes all of it.
            grown = tensor.new_zeros(num_rows, *tensor.shape[1:])
            grown[: len(tensor)] = tensor
            return grown

        with ordinary_tensors():
            for layer, state in zip(self.slot_layers, self._states, strict=True):
                layer.state = state  # without a view, which would keep the former tensors
                state.change(lambda _, tensor: grow(tensor))
            for states in self._linear:
                states.map(grow)
            self._masks = {key: grow(mask) for key, mask in self._masks.items()}
        self._num_rows = num_rows

    def release(self, index: int) -> int | None:
        """Free a sequence's slots; the last sequence moves there. Returns that place."""
        last = len(self._num_seen) - 1
        if index != last:
            for tensor in self._tensors():
                tensor[index].copy_(tensor[last])
        for books in self._books.values():
            books.release(index)
        for numbers in (self._num_seen, self._span_starts):
            numbers[index] = numbers[last]
            numbers.pop()
        self._show()
        return None if index == last else last

    def copy_to(self, cache: H2OCache, row: int) -> None:
        """Copy a sequence at the end of its span into an empty cache; mutates the cache."""
        seen = self._num_seen[row]
        layers: list[Any] = cache.layers
        for states, linear in zip(self._linear, _linear_layers(cache), strict=True):
            states.copy_to(linear, row)
        for pool_layer in self.slot_layers:
            layer = layers[pool_layer.layer_idx]
            state = pool_layer.state.index_select(torch.tensor([row], device=pool_layer.device))
            state.drop_queries()
            if pool_layer.window is not None:
                _fill_window(layer, state, seen)
                continue
            if state.head_of_slot is None:
                state.resize(min(int(state.total.max()), seen) + 1)
            sizes = pool_layer.key_size, pool_layer.value_size
            key, value = (
                torch.empty(
                    1, pool_layer.num_kv_heads, 1, size, dtype=pool_layer.dtype, device=state.device
                )
                for size in sizes
            )
            layer.lazy_initialization(key, value)
            layer.load_state(state, layer.cumulative_length + seen, None)
        self.adopt(cache)

    def adopt(self, cache: H2OCache) -> None:
        """Set what a cache with copied entries needs to continue the sequence; mutates it."""
        layers: list[Any] = cache.layers
        for pool_layer in self.slot_layers:
            layer = layers[pool_layer.layer_idx]
            if pool_layer.window is None:
                layer.writer, layer.num_forwards = pool_layer.writer, 1
                layer.rotations.follow(pool_layer.rotations)

    def begin_drafts(self) -> None:
        """Record what each token of the next forward changes, for `end_drafts`; mutates."""
        self.cache.activate_past_recording()
        for layer in self.slot_layers:  # a mask has columns for the tokens of the forward alone
            layer.cumulative_length.zero_()
            layer.num_columns = 0

    def end_drafts(self, accepted: Sequence[int]) -> int:
        """Roll back to the tokens that each sequence keeps, 1 or more; return what they evicted."""
        for layer in self.slot_layers:
            assert layer.log is not None
            layer.log.take_back(layer, [len(layer.log) - count for count in accepted])
            layer.log = None
        evicted = sum(
            self.count_step([row for row, count in enumerate(accepted) if count > number])
            for number in range(max(accepted))
        )
        self._show()
        return evicted

    def count_step(self, rows: Sequence[int] | None = None) -> int:
        """Note a decode step of some sequences, or of all; returns the entries that it evicted."""
        rows = range(len(self._num_seen)) if rows is None else rows
        full = {kind: books.count_step(rows) for kind, books in self._books.items()}
        for row in rows:
            self._num_seen[row] += 1
        layers = zip(self._kinds, self.slot_layers, strict=True)
        return sum(
            full[kind] * (1 if layer.head_budgets else layer.num_kv_heads)
            for kind, layer in layers
            if layer.window is None
        )

    def _show(self) -> None:
        """Point the cache's layers at the slots in use; mutates the layers."""
        used = len(self._num_seen)
        if used == 0:
            return
        for states in self._linear:
            states.show(used)
        for kind, layer, state in zip(self._kinds, self.slot_layers, self._states, strict=True):
            books = self._books[kind]
            layer.state = state.map(lambda tensor: tensor[:used])
            layer.state.budgets = list(books.budgets)
            layer.state.known_lengths = tuple(self._num_seen)
            layer.state.span_starts = tuple(self._span_starts) if layer.spans else None
            books.set_flags(layer)
            if not books.fills_all_slots:
                layer.state.slot_mask = self._masks[layer.device, layer.num_kv_heads, kind][:used]
            if layer.rotations.rolling is not None and layer.rotations.tables is None:
                layer.rotations.make_tables(layer.slots.capacity)


def _as_slots(cache: H2OCache, sequence: int) -> list[tuple[SlotLayer, int]]:
    """Return a cache's layers as slots, each with the row of a sequence."""
    layers: list[Any] = cache.layers
    first = next(layer for layer in layers if isinstance(layer, SlotLayer))
    lengths = first.state.num_real_tokens
    return [
        (window_slots(layer, index, sequence, int(lengths[sequence])), 0)
        if isinstance(layer, DynamicSlidingWindowLayer)
        else (layer, sequence)
        for index, layer in enumerate(layers)
        if not has_fixed_state(layer)
    ]


def _linear_layers(cache: H2OCache) -> list[Any]:
    return [layer for layer in cache.layers if has_fixed_state(layer)]


def copy_at_cut(cache: H2OCache) -> H2OCache:
    """Return a copy of a cache whose sequences are at the end of their spans."""
    duplicate = cache.fork(1)
    for layer in duplicate.layers:
        if isinstance(layer, SlotLayer):
            layer.state.drop_queries()
    return duplicate


def num_entries(cache: H2OCache) -> int:
    """Entries of all sequences, layers and KV heads; waits for the device once."""
    layers = (layer for layer in cache.layers if isinstance(layer, SlotLayer))
    positions = [layer.state.positions for layer in layers if layer.holds_entries]
    counts = [(of_layer >= 0).sum() for of_layer in positions]
    return int(torch.stack([count.to(counts[0].device) for count in counts]).sum()) if counts else 0


def check_poolable(cache: H2OCache) -> None:
    """Refuse a cache that cannot be pooled, as its sequences cannot join and leave."""
    others = {
        type(layer).__name__
        for index, layer in enumerate(cache.layers)
        if not isinstance(layer, SlotLayer)
        and not has_fixed_state(layer)
        and not is_window_layer(layer, index, cache.config)
    }
    if others:
        raise ValueError(
            f"model type {cache.config.model_type!r} has layers ({', '.join(sorted(others))}) "
            "whose entries are not held in slots; use h2okv batch or generate for it."
        )
    if not cache.rule.is_bounded:
        raise ValueError(
            f"policy={cache.rule.name!r} evicts nothing while decoding, and sequences have a fixed"
            " number of slots; use policy='h2o' (for a full cache with a budget as large as the"
            " longest text)."
        )


def can_split_blocks(cache: H2OCache) -> bool:
    """Tell whether a prompt may be read in several forwards with the same result."""
    if cache.kv_bits is not None or cache.position_rule.rolls or not continues_prompts(cache):
        return False
    return all(
        # A sliding window takes any block in parts by itself.
        is_window_layer(layer, index, cache.config)
        or has_fixed_state(layer)  # and what continues a state takes any block
        or (isinstance(layer, SlotLayer) and layer.rule.is_plain_sum)
        for index, layer in enumerate(cache.layers)
    )


def pin_unread(cache: H2OCache, pins: Iterable[tuple[int, int]]) -> None:
    """Pin of these tokens those that a copy of a state has still to read, and no others."""
    seen = cache.num_seen_tokens
    unread = tuple((max(start, seen), stop) for start, stop in pins if stop > seen)
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            layer.prompt.pins = unread if layer.window is None else ()


def expect_partial_block(cache: H2OCache, is_partial: bool) -> None:
    """Set whether the next forward brings a part of a prompt only, after which none is evicted."""
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            layer.prompt.is_partial = is_partial
