"""Weights in int8, with a scale for each output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from h2okv.engine.packed_slot import PackedSlot, aligned, is_linear, load_torchao
from h2okv.engine.skeleton import Slot


class Int8Slot(PackedSlot):
    """A `PackedSlot` of int8 numbers and one fp32 scale for each output."""

    @classmethod
    def of(cls, slot: Slot) -> Slot:
        """See `PackedSlot.of`."""
        if not is_linear(slot):
            return slot
        return cls._sized(slot, slot.shape.numel(), 4 * slot.shape[0])

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """See `PackedSlot.to_bytes`."""
        torchao = load_torchao()
        # A zero-point is not among its parts: the quantisation is symmetric.
        outputs, inputs = self.original_shape
        linear = nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(parameter.to(self.original_dtype), requires_grad=False)
        torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
        weight: Any = linear.weight
        packed = torch.zeros(self.shape, dtype=torch.uint8)
        numbers, scales = self._parts(packed)
        numbers.copy_(weight.qdata)
        scales.copy_(weight.scale.view(-1, 1))
        return packed

    def as_weight(self, packed: torch.Tensor) -> torch.Tensor:
        """See `PackedSlot.as_weight`."""
        numbers, scales = self._parts(packed)
        weight: torch.Tensor = load_torchao().Int8Tensor(
            numbers, scales, [1, self.original_shape[1]], self.original_dtype
        )
        return weight

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 ``[outputs, inputs]`` and fp32 ``[outputs, 1]``, views."""
        count = self.original_shape.numel()
        start = aligned(count)
        scales = packed[start : start + 4 * self.original_shape[0]]
        numbers = packed[:count].view(torch.int8).view(self.original_shape)
        return numbers, scales.view(torch.float32).view(-1, 1)
