"""A pool of slots that sequences join and leave."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2okv.cache.h2o_cache import H2OCache
from h2okv.cache.layer import empty_value
from h2okv.cache.rope import PositionRule
from h2okv.cache.slots import SlotLayer
from h2okv.config import Budget, TokenBudget
from h2okv.policy import get_policy


def is_window_layer(layer: Any, layer_idx: int, config: PreTrainedConfig) -> bool:
    """Tells whether a layer's tokens see the newest ones and nothing else."""
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
    """Makes slots of what a sliding layer holds of one sequence.

    A token sees itself and the ``W - 1`` before it, which is a step over ``W`` slots.
    """
    window = layer.sliding_window
    budget = Budget(heavy=0, recent=window - 1)
    rule = PositionRule("original", None, None)
    made = SlotLayer(layer_idx, budget, get_policy("recent"), rule)
    made.window = window
    held = min(seen, layer.keys.shape[2])
    with torch.inference_mode(False), torch.no_grad():
        keys, values = (
            torch.nn.functional.pad(
                part[sequence : sequence + 1, :, part.shape[2] - held :], (0, 0, 0, window - held)
            )
            for part in (layer.keys, layer.values)
        )
        made.lazy_initialization(keys, values)
        made._resolve_budget([seen])
        slots = torch.arange(window, device=keys.device)
        positions = torch.where(slots < held, seen - held + slots, -1).to(torch.int32)
        shape = (1, keys.shape[1], window)
        made.keys, made.values = keys.contiguous(), values.contiguous()
        made.positions = positions.expand(shape).contiguous()
        made.scores = torch.zeros(shape, dtype=torch.float32, device=keys.device)
        made.free = torch.full((*shape[:2], 1), min(held, window - 1), device=keys.device)
        made.num_real_tokens += seen
        made.cumulative_length += seen
    return made


class _Tenants:
    """The budgets in use of layers that are alike, and how far they are filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.budgets: list[TokenBudget] = []
        self._room: list[int] = []

    def add(self, budget: TokenBudget, held: int) -> None:
        self.budgets.append(budget)
        self._room.append(budget.total - held)

    def leave(self, row: int) -> None:
        """The last one takes the place."""
        for numbers in (self.budgets, self._room):
            own: list[Any] = numbers
            own[row] = own[-1]
            own.pop()

    def count_step(self) -> int:
        """Takes note of a step; returns how many rows were full before."""
        full = sum(room == 0 for room in self._room)
        self._room = [max(room - 1, 0) for room in self._room]
        return full

    @property
    def held(self) -> int:
        """Entries of all rows in use, of one KV head."""
        return sum(own.total for own in self.budgets) - sum(self._room)

    def show(self, layer: Any) -> bool:
        """Tells a layer what it needs to know of the rows in use; returns whether all are whole."""
        # All rows with all slots need no mask of slots, and none at all once they are full.
        whole = all(own.total == self.capacity for own in self.budgets)
        left = max(self._room)
        layer.batch_size = len(self.budgets)
        layer.row_budgets = list(self.budgets)
        layer.is_full = whole and left == 0
        layer.steps_to_full = left if whole else 0
        layer.has_sinks = any(budget.sink for budget in self.budgets)
        return whole


class RowBlock:
    """One static block of rows for each layer, ``[rows, H, S, ...]``.

    Rows in use are the first ones, without gaps: a decode step runs on a view of these, and when
    one is given back the last one takes its place. Shapes, dtype and devices are read off a cache
    that the model has written to, so that each rank of a model in parts holds its own heads.
    Layers with a sliding window hold its tokens in slots of their own.

    Attributes:
        cache: What the model gets for a decode step of the rows in use; mutated by the model.
        num_rows: As given.
        row_budget: As given.
        num_heads: KV heads of all layers that evict by H2O.
    """

    def __init__(self, like: H2OCache, num_rows: int, row_budget: int) -> None:
        check_fits_rows(like)
        self.cache = like.fork(1)
        self.num_rows = num_rows
        self.row_budget = row_budget
        layers: list[Any] = self.cache.layers
        layers[:] = _as_slots(self.cache, 0)
        # By the window; None for the layers of H2O.
        self._tenants = {own.window: _Tenants(self._capacity(own)) for own in layers}
        self._seen: list[int] = []
        self._storage = [self._allocate(layer) for layer in layers]
        self._marks = self._marks_of(layers)
        self._layers = layers
        self.num_heads = sum(own.num_kv_heads for own in layers if own.window is None)
        for layer in layers:
            layer.rotary = None  # of as many ranks as the cache that this one is like

    def _capacity(self, layer: Any) -> int:
        return self.row_budget if layer.window is None else int(layer.window) - 1

    def _allocate(self, layer: Any) -> dict[str, torch.Tensor]:
        slots, num_slots = layer.positions.shape[2], self._capacity(layer) + 1
        storage: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):
            for name in layer.row_tensors():
                held = getattr(layer, name, None)
                if held is None or name == "enabled":
                    continue
                shape = [self.num_rows, *held.shape[1:]]
                if held.dim() > 2 and held.shape[2] == slots:
                    shape[2] = num_slots
                storage[name] = held.new_full(shape, empty_value(name, num_slots))
        return storage

    def _marks_of(self, layers: list[Any]) -> dict[tuple[torch.device, int], torch.Tensor]:
        """Slots within each row's budget, bool ``[rows, H, S]``: the first ones, in all layers."""
        shape = self.num_rows, self.row_budget + 1
        with torch.inference_mode(False):
            return {
                (own.device, own.num_kv_heads): torch.zeros(
                    shape[0], own.num_kv_heads, shape[1], dtype=torch.bool, device=own.device
                )
                for own in layers
                if own.window is None
            }

    @property
    def num_used(self) -> int:
        """Rows in use, the first ones."""
        return len(self._seen)

    @property
    def num_held(self) -> int:
        """Entries in the rows in use, of one KV head of a layer that evicts by H2O."""
        return self._tenants[None].held

    @property
    def num_seen(self) -> int:
        """Tokens that the sequences in use have seen."""
        return sum(self._seen)

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that hold an entry."""
        total = 0.0
        for layer, storage in zip(self._layers, self._storage, strict=True):
            tenants = self._tenants[layer.window]
            slots = self.num_rows * (tenants.capacity + 1)
            total += tenants.held / slots * sum(tensor.nbytes for tensor in storage.values())
        return int(total)

    @property
    def full_bytes(self) -> int:
        """Bytes of the keys and values that a full cache would hold for the same tokens."""
        return sum(self.full_bytes_of(seen) for seen in list(self._seen))

    def full_bytes_of(self, length: int) -> int:
        """Bytes that a full cache would hold for a sequence."""
        numbers = 0
        for layer in self._layers:
            held = length if layer.window is None else min(length, layer.window - 1)
            numbers += held * layer.num_kv_heads * (layer.key_size + layer.value_size)
        return int(numbers * self._layers[0].dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, in use or not."""
        tensors = [tensor for own in self._storage for tensor in own.values()]
        return sum(tensor.nbytes for tensor in (*tensors, *self._marks.values()))

    def add(self, source: H2OCache, sequence: int = 0) -> int:
        """Copies a sequence into a free row."""
        layers = _as_slots(source, sequence)
        kinds = {own.window: own for own in layers}
        budget = kinds[None].row_budgets[_place(kinds[None], sequence)]
        if budget.total > self.row_budget:
            raise ValueError(
                f"a budget of {budget.total} entries does not fit a row of {self.row_budget}; "
                "lower it, or make the rows larger."
            )
        if self.num_used == self.num_rows:
            raise ValueError(f"all {self.num_rows} rows are in use; give one back first.")
        row = self.num_used
        for own, layer, storage in zip(self._layers, layers, self._storage, strict=True):
            _copy_row(layer, _place(layer, sequence), storage, row)
            own.owner = layer.owner
            own.rotation, own.knows_rotation = layer.rotation, layer.knows_rotation
        for marks in self._marks.values():
            marks[row] = torch.arange(marks.shape[2], device=marks.device) <= budget.total
        for window, layer in kinds.items():
            place = _place(layer, sequence)
            held = int((layer.positions[place, 0] >= 0).sum())
            self._tenants[window].add(layer.row_budgets[place], held)
        self._seen.append(int(kinds[None].num_real_tokens[sequence]))
        self._show()
        return row

    def give_back(self, row: int) -> int | None:
        """Frees a row; the last row in use takes its place."""
        last = self.num_used - 1
        if row != last:
            for storage in self._storage:
                for tensor in storage.values():
                    tensor[row].copy_(tensor[last])
            for marks in self._marks.values():
                marks[row].copy_(marks[last])
        for tenants in self._tenants.values():
            tenants.leave(row)
        self._seen[row] = self._seen[last]
        self._seen.pop()
        self._show()
        return None if row == last else last

    def count_step(self) -> int:
        """Notes that a decode step has run; mutates what is known of the rows."""
        full = {window: tenants.count_step() for window, tenants in self._tenants.items()}
        self._seen = [seen + 1 for seen in self._seen]
        return full[None] * self.num_heads

    def _show(self) -> None:
        """Lets the cache's layers see the rows in use; mutates them."""
        used = self.num_used
        if used == 0:
            return
        for layer, storage in zip(self._layers, self._storage, strict=True):
            for name, tensor in storage.items():
                setattr(layer, name, tensor[:used])
            layer.enabled = None
            if not self._tenants[layer.window].show(layer):
                layer.enabled = self._marks[layer.device, layer.num_kv_heads][:used]
            if layer.rotation is not None and layer.rotary is None:
                layer.set_rotary(self.row_budget + 1)


def _as_slots(cache: H2OCache, sequence: int) -> list[Any]:
    """A cache's layers; those with a sliding window as slots of the one sequence."""
    layers: list[Any] = cache.layers
    lengths = next(own for own in layers if isinstance(own, SlotLayer)).num_real_tokens
    return [
        window_slots(layer, index, sequence, int(lengths[sequence]))
        if isinstance(layer, DynamicSlidingWindowLayer)
        else layer
        for index, layer in enumerate(layers)
    ]


def _place(layer: Any, sequence: int) -> int:
    """Where a layer of `_as_slots` has the sequence."""
    return sequence if layer.window is None else 0


def held_by_row(cache: H2OCache) -> list[int]:
    """Counts what a cache's sequences hold; waits for the device."""
    layer: Any = next(own for own in cache.layers if isinstance(own, SlotLayer))
    counts: list[int] = (layer.positions[:, 0] >= 0).sum(dim=-1).tolist()
    return counts


def check_fits_rows(cache: H2OCache) -> None:
    """Refuses caches whose sequences cannot come and go in rows of slots."""
    others = {
        type(layer).__name__
        for index, layer in enumerate(cache.layers)
        if not isinstance(layer, SlotLayer) and not is_window_layer(layer, index, cache.config)
    }
    if others:
        raise ValueError(
            f"model type {cache.config.model_type!r} has layers ({', '.join(sorted(others))}) "
            "whose entries are not held in rows of slots; use h2okv batch or generate for it."
        )
    if not cache.policy.is_bounded:
        raise ValueError(
            f"policy={cache.policy.name!r} evicts nothing, so a row of fixed size cannot hold it; "
            "use policy='h2o' with a budget as large as the longest text for a full cache."
        )


def _copy_row(layer: Any, place: int, storage: dict[str, torch.Tensor], row: int) -> None:
    """Copies one of a layer's sequences into a row, and empties the row's other slots."""
    slots, num_slots = layer.positions.shape[2], storage["positions"].shape[2]
    for name, whole in storage.items():
        target = whole[row]
        held = getattr(layer, name)
        if held.dim() > 2 and held.shape[2] == slots:
            target[:, :slots] = held[place]
            # What a request before has left there may not even be a number.
            target[:, slots:] = empty_value(name, num_slots)
            if name == "ranks":  # of an empty slot the last one
                target[:, :slots].masked_fill_(layer.positions[place] < 0, num_slots - 1)
        else:
            target.copy_(held[place])


def can_take_pieces(cache: H2OCache) -> bool:
    """Tells whether a block may come in several forwards without being another block."""
    layers = enumerate(cache.layers)
    return (
        all(
            isinstance(layer, SlotLayer)
            and layer.is_plain
            and not layer.has_static_mask
            # Which takes any block in pieces by itself.
            or is_window_layer(layer, index, cache.config)
            for index, layer in layers
        )
        and cache.kv_bits is None
        and not cache.rule.rolls
    )


def expect_piece(cache: H2OCache, goes_on: bool) -> None:
    """Says what the next forward brings.

    Every query of a piece attends to what was kept before the block and to the block up to
    itself, and nothing is evicted, so that outputs, scores and what is kept in the end are those
    of the block in one forward. Meanwhile the block is held whole.
    """
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            layer.goes_on = goes_on
