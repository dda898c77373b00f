"""Linear layers with int8 weights: half the bytes to read, by torchao's own tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from h2okv.engine.skeleton import Skeleton, Slot

WEIGHT_BITS = (8,)
_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedSlot(Slot):
    """A linear layer's weight, stored as int8 with one fp32 scale for each output.

    Attributes:
        original_shape: Of the weight, ``[outputs, inputs]``.
        original_dtype: That products with it have.
    """

    original_shape: torch.Size
    original_dtype: torch.dtype

    @property
    def count(self) -> int:
        """See `Slot.count`."""
        return self.original_shape.numel()

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """Quantises a weight; uint8."""
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

    def fill(self, tensor: torch.Tensor) -> None:
        """Puts the stored bytes there as a tensor that multiplies; mutates the module.

        It hides the parameter, which stays without numbers: whoever looks through a model's
        parameters expects ordinary tensors.
        """
        numbers, scales = self._parts(tensor)
        vars(self.owner)[self.attribute] = load_torchao().Int8Tensor(
            numbers, scales, [1, self.original_shape[1]], self.original_dtype
        )

    def empty(self) -> None:
        """See `Slot.empty`."""
        vars(self.owner).pop(self.attribute, None)
        hollow = torch.empty(self.original_shape, dtype=self.original_dtype, device="meta")
        super().fill(hollow)

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 ``[outputs, inputs]`` and fp32 ``[outputs, 1]``, views."""
        count = self.original_shape.numel()
        start = _aligned(count)
        scales = packed[start : start + 4 * self.original_shape[0]]
        numbers = packed[:count].view(torch.int8).view(self.original_shape)
        return numbers, scales.view(torch.float32).view(-1, 1)


def pack_layers(skeleton: Skeleton) -> Skeleton:
    """Makes the decoder layers' linear weights int8.

    Args:
        skeleton: A model; norms, biases, the embedding and the head stay as they are.

    Returns:
        The same model with packed slots.

    Raises:
        ValueError: If no weight can be packed, or the extra is not installed.
    """
    load_torchao()
    units = [
        replace(unit, slots=tuple(_packed(slot) for slot in unit.slots))
        if unit.layer_idx is not None
        else unit
        for unit in skeleton.units
    ]
    if not any(isinstance(slot, PackedSlot) for unit in units for slot in unit.slots):
        raise ValueError(
            f"{type(skeleton.model).__name__} has no linear layers whose weights could be int8;"
            " leave out --weight-bits"
        )
    return replace(skeleton, units=tuple(units))


def _packed(slot: Slot) -> Slot:
    if type(slot.owner) is not nn.Linear or slot.attribute != "weight":
        return slot
    size = _aligned(slot.shape.numel()) + _aligned(4 * slot.shape[0])
    return PackedSlot(
        slot.name, slot.owner, slot.attribute, torch.Size([size]), torch.uint8,
        slot.shape, slot.dtype,
    )  # fmt: skip


def load_torchao() -> Any:
    """Imports torchao's quantisation, which is part of an extra.

    Returns:
        The module.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import torchao.quantization
    except ImportError as error:
        raise ValueError(
            "--weight-bits needs torchao; install it with pip install 'h2okv[quant]'"
        ) from error
    return torchao.quantization


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
