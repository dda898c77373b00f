"""Weights in int4 by groups, for CPUs: torch's own int4 product, packed and wrapped by torchao."""

from __future__ import annotations

from typing import Any

import torch

from h2okv.engine.packed_slot import PackedSlot, aligned, is_linear, load_torchao
from h2okv.engine.skeleton import Slot

_GROUPS = (64, 32)
"""Numbers that share a scale and a zero, the first that divides a row."""
_OUTPUTS = 16
"""The packing takes rows by so many."""


class Int4Slot(PackedSlot):
    """A `PackedSlot` of two numbers in a byte, and a bf16 scale and zero for each group of a row.

    How the bytes lie depends on the vector instructions of the processor that packed them.
    """

    @classmethod
    def of(cls, slot: Slot) -> Slot:
        """See `PackedSlot.of`; a weight whose sizes the packing does not take stays as it is."""
        if not is_linear(slot):
            return slot
        outputs, inputs = slot.shape
        group = _group_of(inputs)
        if group is None or outputs % _OUTPUTS:
            return slot
        return cls._sized(slot, outputs * inputs // 2, 4 * outputs * inputs // group)

    @property
    def form(self) -> str:
        """See `Slot.form`."""
        return f"{super().form} {torch.backends.cpu.get_cpu_capability()}"

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """See `PackedSlot.to_bytes`."""
        weight: Any = load_int4().from_hp(parameter.to(self.original_dtype), self._block)
        packed = torch.zeros(self.shape, dtype=torch.uint8)
        codes, grid = self._parts(packed)
        codes.copy_(weight.qdata)
        grid.copy_(weight.scale_and_zero)
        return packed

    def as_weight(self, packed: torch.Tensor) -> torch.Tensor:
        """See `PackedSlot.as_weight`."""
        codes, grid = self._parts(packed)
        weight: torch.Tensor = load_int4()(codes, grid, self._block, self.original_shape)
        return weight

    @property
    def _block(self) -> list[int]:
        return [1, _group_of(self.original_shape[1]) or 0]

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 ``[outputs, inputs / 2]`` and bf16 ``[groups, outputs, 2]``, views."""
        outputs, inputs = self.original_shape
        size, groups = outputs * inputs // 2, inputs // self._block[1]
        start = aligned(size)
        grid = packed[start : start + 4 * outputs * groups].view(self.original_dtype)
        return packed[:size].view(outputs, inputs // 2), grid.view(groups, outputs, 2)


def load_int4() -> Any:
    """Imports torchao's int4 tensor for CPUs, which is not among its lasting names.

    Returns:
        The class.

    Raises:
        ValueError: If torchao is not installed, or has it no more.
    """
    load_torchao()
    try:
        from torchao.prototype.quantization.int4 import Int4OpaqueTensor
    except ImportError as error:
        raise ValueError(
            "--weight-bits 4 needs a torchao with int4 for CPUs (its prototype Int4OpaqueTensor, as"
            " in 0.18.0); give --weight-bits 8, or install that version"
        ) from error
    return Int4OpaqueTensor


def check_int4(device: torch.device, dtype: torch.dtype) -> None:
    """Refuses where torchao's int4 does not work, or is slower than no int4 at all.

    Args:
        device: Where the model computes.
        dtype: Of its weights.

    Raises:
        ValueError: Saying why.
    """
    if device.type != "cpu":
        raise ValueError(
            f"--weight-bits 4 is for CPUs: torchao packs int4 for {device.type} on the device"
            " itself, and not layer by layer from a file; give --weight-bits 8"
        )
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"--weight-bits 4 is fast in bfloat16 only (in {name} a product takes many times as"
            " long as without it); add --dtype bfloat16, or give --weight-bits 8"
        )


def _group_of(inputs: int) -> int | None:
    return next((group for group in _GROUPS if inputs % group == 0), None)
