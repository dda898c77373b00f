"""Slots for a fixed number of sequences that come and go."""

from __future__ import annotations

from typing import Any

import torch

from h2okv.budget import TokenBudget
from h2okv.cache.h2o_cache import H2OCache
from h2okv.cache.rows import empty_value
from h2okv.cache.slots import SlotLayer


class RowBlock:
    """One static block of rows for each layer, ``[rows, H, S, ...]``.

    Rows in use are the first ones, without gaps: a decode step runs on a view of these, and when
    one is given back the last one takes its place. Shapes, dtype and devices are read off a cache
    that the model has written to, so that each rank of a model in parts holds its own heads.

    Args:
        like: A cache that has read one sequence; unchanged.
        num_rows: Rows.
        row_budget: Entries that a row can hold, K; it has ``K + 1`` slots.

    Attributes:
        cache: What the model gets for a decode step of the rows in use; mutated by the model.
        num_rows: As given.
        row_budget: As given.
        num_heads: KV heads of all layers.

    Raises:
        ValueError: If a layer keeps transformers' own cache, or the policy evicts nothing.
    """

    def __init__(self, like: H2OCache, num_rows: int, row_budget: int) -> None:
        check_fits_rows(like)
        self.cache = like.fork(1)
        self.num_rows = num_rows
        self.row_budget = row_budget
        self._budgets: list[TokenBudget] = []
        self._room: list[int] = []
        self._seen: list[int] = []
        self._storage = [self._allocate(layer) for layer in self.cache.layers]
        layers: list[Any] = self.cache.layers
        self.num_heads = sum(layer.num_kv_heads for layer in layers)
        for layer in layers:
            layer.turns = None  # of as many ranks as the cache that this one is like

    def _allocate(self, layer: Any) -> dict[str, torch.Tensor]:
        slots, num_slots = layer.positions.shape[2], self.row_budget + 1
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
            storage["enabled"] = torch.zeros(
                storage["positions"].shape, dtype=torch.bool, device=layer.device
            )
        return storage

    @property
    def num_used(self) -> int:
        """Rows in use, the first ones."""
        return len(self._budgets)

    @property
    def num_held(self) -> int:
        """Entries in the rows in use, of one KV head."""
        return sum(own.total for own in self._budgets) - sum(self._room)

    @property
    def num_seen(self) -> int:
        """Tokens that the sequences in use have seen."""
        return sum(self._seen)

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that hold an entry."""
        return self.num_held * self.nbytes // (self.num_rows * (self.row_budget + 1))

    @property
    def full_bytes(self) -> int:
        """Bytes of the keys and values that a full cache would hold for the same tokens."""
        return self.num_seen * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in a full cache, of all layers."""
        layers: list[Any] = self.cache.layers
        numbers = sum(own.num_kv_heads * (own.key_size + own.value_size) for own in layers)
        return int(numbers * layers[0].dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, in use or not."""
        return sum(tensor.nbytes for own in self._storage for tensor in own.values())

    def add(self, source: H2OCache) -> int:
        """Copies a sequence into a free row.

        Args:
            source: A cache of one sequence that has read a prompt; unchanged.

        Returns:
            The row.

        Raises:
            ValueError: If its budget is larger than a row, or no row is free.
        """
        first: Any = source.layers[0]
        budget = first.row_budgets[0]
        if budget.total > self.row_budget:
            raise ValueError(
                f"a budget of {budget.total} entries does not fit a row of {self.row_budget}; "
                "lower it, or make the rows larger."
            )
        if self.num_used == self.num_rows:
            raise ValueError(f"all {self.num_rows} rows are in use; give one back first.")
        row = self.num_used
        layers: Any = zip(self.cache.layers, source.layers, self._storage, strict=True)
        for own, layer, storage in layers:
            _copy_row(layer, storage, row)
            own.owner, own.terms = layer.owner, layer.terms
            own.rotation, own.knows_rotation = layer.rotation, layer.knows_rotation
        held = int((first.positions[0, 0] >= 0).sum())
        self._budgets.append(budget)
        self._room.append(budget.total - held)
        self._seen.append(int(first.num_real_tokens[0]))
        self._show()
        return row

    def give_back(self, row: int) -> int | None:
        """Frees a row; the last row in use takes its place.

        Args:
            row: In use.

        Returns:
            The number that the moved row had, or ``None`` if none was moved.
        """
        last = self.num_used - 1
        if row != last:
            for storage in self._storage:
                for tensor in storage.values():
                    tensor[row].copy_(tensor[last])
        for numbers in (self._budgets, self._room, self._seen):
            own: list[Any] = numbers
            own[row] = own[last]
            own.pop()
        self._show()
        return None if row == last else last

    def count_step(self) -> int:
        """Notes that a decode step has run; mutates what is known of the rows.

        Returns:
            Entries that it evicted, of all layers and KV heads.
        """
        full = sum(room == 0 for room in self._room)
        self._room = [max(room - 1, 0) for room in self._room]
        self._seen = [seen + 1 for seen in self._seen]
        return full * self.num_heads

    def _show(self) -> None:
        """Lets the cache's layers see the rows in use; mutates them."""
        used = self.num_used
        if used == 0:
            return
        # All rows with all slots need no mask of slots, and none at all once they are full.
        whole = all(own.total == self.row_budget for own in self._budgets)
        left = max(self._room)
        for layer, storage in zip(self.cache.layers, self._storage, strict=True):
            own: Any = layer
            for name, tensor in storage.items():
                setattr(own, name, tensor[:used])
            if whole:
                own.enabled = None
            own.batch_size = used
            own.row_budgets = list(self._budgets)
            own.step = None  # what serves some rows may not serve others
            own.is_full = whole and left == 0
            own.steps_to_full = left if whole else 0
            own.has_sinks = any(budget.sink for budget in self._budgets)
            if own.rotation is not None and own.turns is None:
                own.know_turns(self.row_budget + 1)


def check_fits_rows(cache: H2OCache) -> None:
    """Refuses caches whose sequences cannot come and go in rows of slots.

    Args:
        cache: Any.

    Raises:
        ValueError: Naming the remedy.
    """
    others = sorted({type(own).__name__ for own in cache.layers if not isinstance(own, SlotLayer)})
    if others:
        raise ValueError(
            f"model type {cache.config.model_type!r} has layers ({', '.join(others)}) that are not "
            "full attention; their entries are not held in rows of slots. Use h2okv batch or "
            "generate for it."
        )
    if not cache.policy.is_bounded:
        raise ValueError(
            f"policy={cache.policy.name!r} evicts nothing, so a row of fixed size cannot hold it; "
            "use policy='h2o' with a budget as large as the longest text for a full cache."
        )


def _copy_row(layer: Any, storage: dict[str, torch.Tensor], row: int) -> None:
    """Copies one layer's only sequence into a row, and empties the row's other slots."""
    slots, num_slots = layer.positions.shape[2], storage["positions"].shape[2]
    for name, whole in storage.items():
        target = whole[row]
        held = getattr(layer, name, None)
        if held is None:  # `enabled`, of a sequence whose slots are all its own
            target.fill_(False)
            target[:, :slots] = True
        elif held.dim() > 2 and held.shape[2] == slots:
            target[:, :slots] = held[0]
            # What a request before has left there may not even be a number.
            target[:, slots:] = empty_value(name, num_slots)
            if name == "ranks":  # of an empty slot the last one
                target[:, :slots].masked_fill_(layer.positions[0] < 0, num_slots - 1)
        else:
            target.copy_(held[0])
