"""Layers whose entries are kept in 8 or 4 bits, and the masking that rounds in the same way.

A number is rounded once, when its token becomes an entry. A block attends to itself in full
precision, and to what is held as it unpacks; a single token is an entry from its own step on.
"""

from __future__ import annotations

from typing import Any

import torch

from h2okv.cache.masked import SimulatedLayer
from h2okv.cache.slots import SlotLayer
from h2okv.ops.decode import compact
from h2okv.ops.quant import Packed, pack, packed_bytes, rounded, unpack

pad = torch.nn.functional.pad


class QuantizedSlotLayer(SlotLayer):
    """A `SlotLayer` whose `keys` and `values` are codes, uint8 ``[B, H, S, C]``.

    State beyond that of `SlotLayer`: ``key_grid`` and ``value_grid``, bf16
    ``[B, H, S, 2 * groups]``; see `h2okv.ops.quant.Packed`.
    """

    is_packed = True

    def __init__(self, *args: Any, bits: int) -> None:
        self.bits = bits
        super().__init__(*args)

    def _forget(self) -> None:
        super()._forget()
        self.key_grid: torch.Tensor | None = None
        self.value_grid: torch.Tensor | None = None

    def row_tensors(self) -> tuple[str, ...]:
        """Names the attributes whose first dimension is the batch."""
        # Grids first: wherever all lie one behind the other, two-byte numbers come before bytes.
        return ("key_grid", "value_grid", *super().row_tensors())

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """See `ScoredLayer.state`."""
        tensors, numbers = super().state()
        # What codes do not tell.
        numbers["dtype"] = str(self.dtype).removeprefix("torch.")
        numbers["sizes"] = [self.key_size, self.value_size]
        return tensors, numbers

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """See `ScoredLayer.restore`; of a layer that is in use, dtype and sizes may be left out."""
        if "dtype" in numbers:
            dtype, sizes = getattr(torch, numbers["dtype"]), numbers["sizes"]
        else:
            dtype, sizes = self.dtype, [self.key_size, self.value_size]
        super().restore(tensors, numbers)
        self.dtype, (self.key_size, self.value_size) = dtype, sizes

    def _entries(self) -> tuple[Packed, Packed]:
        return (
            Packed(self.keys, self.key_grid, self.bits, self.key_size),
            Packed(self.values, self.value_grid, self.bits, self.value_size),
        )

    def _readable(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._entries()
        return unpack(keys).to(self.dtype), unpack(values).to(self.dtype)

    def _take(
        self, key: torch.Tensor, value: torch.Tensor, indices: torch.Tensor, num_slots: int
    ) -> None:
        """See `SlotLayer._take`; what was held keeps its codes."""
        held = (None, None) if self.positions is None else self._entries()
        made = []
        for states, before in zip((key, value), held, strict=True):
            # Only what stays is packed.
            packed = pack(self.operations.compact(states, indices, num_slots), self.bits)
            if before is not None:
                packed = _with_held(packed, before, indices)
            made.append(packed)
        (self.keys, self.key_grid), (self.values, self.value_grid) = (own[:2] for own in made)

    def _add_slots(self, count: int) -> None:
        super()._add_slots(count)
        room = (0, 0, 0, count)
        self.key_grid, self.value_grid = pad(self.key_grid, room), pad(self.value_grid, room)

    def _held_norms(self) -> torch.Tensor | None:
        if not self.scoring.uses_values:
            return None
        return self._norms_of(unpack(self._entries()[1]).to(self.dtype))

    def _prepare_step(self, value: torch.Tensor, real: torch.Tensor | None) -> None:
        super()._prepare_step(rounded(value, self.bits), real)

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, grids, scores, positions, ranks and norms."""
        grids = (self.key_grid, self.value_grid)
        return super().nbytes + sum(grid.nbytes for grid in grids if grid is not None)


class QuantizedSimulatedLayer(SimulatedLayer):
    """A `SimulatedLayer` that rounds as `QuantizedSlotLayer` does; it saves nothing."""

    def __init__(self, *args: Any, bits: int) -> None:
        self.bits = bits
        super().__init__(*args)

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
        past = 0 if self.positions is None else self.positions.shape[2]
        if past and key.shape[2] == 1:
            key, value = rounded(key, self.bits), rounded(value, self.bits)
            return super()._attend(query, key, value, real, scale, softcap)
        output = super()._attend(query, key, value, real, scale, softcap)
        self.keys = self._with_rounded(self.keys, past)
        self.values = self._with_rounded(self.values, past)
        self.norms = self._norms_of(self.values)
        return output

    def _with_rounded(self, states: torch.Tensor, past: int) -> torch.Tensor:
        """Rounds the newest of ``[B, H, N, D]``, which have become entries."""
        return torch.cat([states[:, :, :past], rounded(states[:, :, past:], self.bits)], dim=2)

    @property
    def nbytes(self) -> int:
        """Bytes that dropping would hold for the entries alive (the mask itself saves none)."""
        if self.positions is None:
            return 0
        entry = sum(packed_bytes(size, self.bits) for size in (self.key_size, self.value_size))
        entry += self.scores.element_size() + self.positions.element_size()
        return int((self.positions >= 0).sum()) * entry


def _with_held(packed: Packed, held: Packed, indices: torch.Tensor) -> Packed:
    """Puts the codes of what was packed before into new slots.

    Args:
        packed: ``[B, H, S, D]``, all that stays, packed; mutated.
        held: ``[B, H, N, D]``, as it was.
        indices: int64 ``[B, H, K]`` of the slots' entries; those below N were held.
    """
    past, count = held.shape[2], indices.shape[2]
    old = (indices < past).unsqueeze(-1)
    places = indices.clamp(max=past - 1)
    for new, before in ((packed.codes, held.codes), (packed.grid, held.grid)):
        own = new[:, :, :count]
        own.copy_(torch.where(old, compact(before, places, count), own))
    return packed
