"""A pool of slots that sequences join and leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass
class PooledSequence:
    """What the host knows of a sequence in a pool; of budgets for each kind of layer."""

    seen: int  # its tokens
    span_start: int  # those before its first span
    budgets: dict[int, TokenBudget]
    totals: dict[int, tuple[int, ...]]  # K, or that of each head where heads share a row
    # Entries that it lacks until its span ends, as a cut has waited for the end of an image.
    num_lacking: int = 0
    # Whether its span will have a query of each token, without a look.
    has_queries: bool = False

    def read_one(self, span: int) -> int:
        """Count a token; return the entries that it lacked if its span has ended; mutates."""
        self.seen, lacking = self.seen + 1, 0
        if (self.seen - self.span_start) % span == 0:
            lacking, self.num_lacking = self.num_lacking, 0
        return lacking


class SlotPool:
    """Slots for up to `max_num_seqs` sequences; in a layer the same number for each.

    ``capacities`` are the most entries of a sequence, for each layer that evicts by H2O; the mean
    of its heads where these hold different numbers. ``largest_heads`` are those of the
    layer's largest head: a step is recorded for its slots, whatever the sequences hold.

    Sequences in use are the first ones, without gaps: a decode step runs on a view of these, and
    when one is released the last one takes its place. A pool that grows begins with slots for one
    sequence, and doubles them whenever all are in use. Shapes, dtype and devices are read off a
    cache that the model has written to, so that each rank of a model in parts holds its own heads.
    """

    def __init__(
        self,
        like: H2OCache,
        max_num_seqs: int,
        capacities: Sequence[float],
        grows: bool = False,
        largest_heads: Sequence[float] = (),
    ) -> None:
        # What the model gets for a decode step of the sequences in use; mutated by the model.
        self.cache = like.fork(1)
        self.max_num_seqs = max_num_seqs
        self._num_rows = num_rows = 1 if grows else max_num_seqs  # sequences that have slots
        self.cache.num_rows = num_rows
        layers: list[Any] = self.cache.layers
        self._linear = [LinearStates(layer, num_rows) for layer in _linear_layers(self.cache)]
        self.slot_layers = [layer for layer, _ in _as_slots(self.cache, 0)]
        for layer in self.slot_layers:
            layers[layer.layer_idx] = layer
        # Layers with one window have equal budgets and counts, and so have those of H2O unless each
        # has its own budget; a kind is named by its first layer.
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
        self._sequences: list[PooledSequence] = []  # in use
        self._num_entries = 0  # of these, in all heads of layers that evict by H2O
        self._span = max(layer.slots.span for layer in self.slot_layers)
        self._states = []
        # Slots within each sequence's budget, bool [B, H, S], for layers of one kind.
        self._masks: dict[tuple[torch.device, int, int], Tensor] = {}
        self.num_heads = 0  # KV heads of all layers that evict by H2O
        of_head = iter(largest_heads)
        for kind, layer in zip(self._kinds, self.slot_layers, strict=True):
            if layer.window is None:
                layer.slots.reserved = round(next(of_head, 0)) + layer.slots.span
                self.num_heads += layer.num_kv_heads
            heads, span = len(layer.head_budgets or (None,)), layer.slots.span
            layer.slots.capacity = round(heads * (largest[kind] + span))
            layer.slots.has_all_slots = layer.head_budgets is not None
            layer.rotations.tables = None  # of as many ranks as the cache that this one is like
            self._states.append(layer.state.like(num_rows, layer.slots.capacity))
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
            layer = self.slot_layers[kind]
            slots = self._num_rows * layer.slots.capacity
            nbytes = sum(tensor.nbytes for tensor in state.tensors().values())
            total += self._count_entries(layer) / slots * nbytes
        return int(total) + len(self._sequences) * self.linear_bytes

    def _count_entries(self, layer: SlotLayer) -> int:
        """Return a layer's entries, of one head where all hold as many."""
        if not self._sequences:
            return 0
        return sum(map(sum, layer.slots.count_entries(layer.state)))

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
        return sum(self.full_bytes_of(sequence.seen) for sequence in list(self._sequences))

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
        layers, row = _as_slots(source, sequence), len(self._sequences)
        for layer, _ in layers:
            if layer.head_budgets is not None:  # whose slots cannot be added one by one
                layer.slots.make_static(layer.state, layer.dtype)
        assert row < self.max_num_seqs, "the scheduler counts them"
        if row == self._num_rows:
            self._grow(min(2 * row, self.max_num_seqs))
        budgets, totals = {}, {}
        for kind in set(self._kinds):
            layer, index = layers[kind]
            budgets[kind], totals[kind] = layer.state.budgets[index], layer.state.totals()[index]
            num_slots = sum(totals[kind]) + len(totals[kind])
            assert num_slots <= self.slot_layers[kind].slots.capacity, "the engine refuses more"
        for pool_layer, (layer, index), state in zip(
            self.slot_layers, layers, self._states, strict=True
        ):
            state.copy_sequence(row, layer.state, index)
            pool_layer.writer = layer.writer
            pool_layer.rotations.follow(layer.rotations)
        for states, linear in zip(self._linear, _linear_layers(source), strict=True):
            states.admit(row, linear, sequence)
        for (_, _, kind), mask in self._masks.items():
            mask[row] = torch.arange(mask.shape[2], device=mask.device) <= budgets[kind].total
        first, index = next(pair for pair in layers if pair[0].window is None)
        start = first.state.span_starts[index] if first.state.span_starts else 0
        admitted = PooledSequence(first.state.lengths()[index], start, budgets, totals)
        admitted.has_queries = first.state.scored_lengths is not None
        self._sequences.append(admitted)
        before = self._num_entries
        self._show()
        if first.state.has_gaps:
            positions = [la.state.positions[at] for la, at in layers if la.window is None]
            num_entries = sum(int((of_layer >= 0).sum()) for of_layer in positions)
            admitted.num_lacking = self._num_entries - before - num_entries
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
        self._num_rows = self.cache.num_rows = num_rows

    def release(self, index: int) -> int | None:
        """Free a sequence's slots; the last sequence moves there. Returns that place."""
        last = len(self._sequences) - 1
        if index != last:
            groups = defaultdict[Any, list[Tensor]](list)
            for tensor in self._tensors():
                groups[tensor.device, tensor.dtype].append(tensor)
            for group in groups.values():  # a GPU copies the tensors of all layers together
                rows = [tensor[index] for tensor in group], [tensor[last] for tensor in group]
                torch._foreach_copy_(*rows)
        # A step through a row that is not in use reads no entries.
        torch._foreach_clamp_max_([state.positions[last] for state in self._states], -1)
        self._sequences[index] = self._sequences[last]
        self._sequences.pop()
        self._show()
        return None if index == last else last

    def copy_to(self, cache: H2OCache, row: int) -> None:
        """Copy a sequence at the end of its span into an empty cache; mutates the cache."""
        seen = self._sequences[row].seen
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

    def count_step(self) -> int:
        """Note that each sequence has read a token; return the entries evicted."""
        before = self._num_entries
        lacking = sum(sequence.read_one(self._span) for sequence in self._sequences)
        for layer in self.slot_layers:
            layer.state.known_lengths = tuple(sequence.seen for sequence in self._sequences)
        self._num_entries = self._count_all_entries()
        read = len(self._sequences) * self.num_heads
        return before + read - self._num_entries - lacking

    def _count_all_entries(self) -> int:
        """Return the entries in all heads of layers that evict by H2O."""
        counts = {kind: self._count_entries(self.slot_layers[kind]) for kind in set(self._kinds)}
        return sum(
            counts[kind] * (1 if layer.head_budgets else layer.num_kv_heads)
            for kind, layer in zip(self._kinds, self.slot_layers, strict=True)
            if layer.window is None
        )

    def _show(self) -> None:
        """Point the cache's layers at the slots in use; mutates the layers."""
        used = len(self._sequences)
        if used == 0:
            self._num_entries = 0
            return
        for states in self._linear:
            states.show(used)
        for kind, layer, state in zip(self._kinds, self.slot_layers, self._states, strict=True):
            layer.state = state.map(lambda tensor: tensor[:used])
            layer.state.budgets = [sequence.budgets[kind] for sequence in self._sequences]
            layer.state.known_totals = tuple(sequence.totals[kind] for sequence in self._sequences)
            layer.state.known_lengths = tuple(sequence.seen for sequence in self._sequences)
            if layer.spans:
                layer.state.span_starts = tuple(each.span_start for each in self._sequences)
                if all(each.has_queries for each in self._sequences):
                    layer.state.scored_lengths = (-1,) * used  # all have read a token since a cut
            mask = self._masks.get((layer.device, layer.num_kv_heads, kind))
            is_even = all(b.total + 1 == layer.slots.capacity for b in layer.state.budgets)
            if mask is not None and not is_even:
                layer.state.slot_mask = mask[:used]
            layer.slots.refresh(layer.state, layer.dtype)
            if layer.rotations.rolling is not None and layer.rotations.tables is None:
                layer.rotations.make_tables(layer.slots.capacity)
        self._num_entries = self._count_all_entries()


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
            " number of slots; give a cache that evicts, such as 'h2o:512', or one that holds the"
            f" longest text, 'h2o:{cache.position_rule.window or 8192}'."
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
