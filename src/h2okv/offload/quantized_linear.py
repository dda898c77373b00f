"""Linear layers in 8 or 4 bits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from h2okv.offload.meta_model import MetaModel, ParameterSlot

_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedSlot(ParameterSlot):
    """A linear layer's weight, stored as the bytes of a tensor that torchao multiplies with.

    Attributes:
        original_shape: Of the weight, ``[outputs, inputs]``.
        original_dtype: That products with it have.
    """

    original_shape: torch.Size
    original_dtype: torch.dtype

    @classmethod
    @abstractmethod
    def of(cls, slot: ParameterSlot) -> ParameterSlot:
        """Makes a linear layer's slot a packed one; one that cannot be packed is given back."""

    @abstractmethod
    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """Quantizes a weight; uint8."""

    @abstractmethod
    def as_weight(self, packed: torch.Tensor) -> torch.Tensor:
        """Makes of stored bytes, shared and not copied, a tensor that multiplies."""

    @property
    def num_weights(self) -> int:
        """See `ParameterSlot.num_weights`."""
        return self.original_shape.numel()

    def fill(self, tensor: torch.Tensor) -> None:
        """Installs the stored bytes as a tensor that multiplies; mutates the module.

        It hides the parameter, which stays on the meta device: code that walks through a model's
        parameters expects ordinary tensors.
        """
        vars(self.owner)[self.attribute] = self.as_weight(tensor)

    def empty(self) -> None:
        """See `ParameterSlot.empty`."""
        vars(self.owner).pop(self.attribute, None)
        meta_tensor = torch.empty(self.original_shape, dtype=self.original_dtype, device="meta")
        super().fill(meta_tensor)

    @classmethod
    def _sized(cls, slot: ParameterSlot, *sizes: int) -> PackedSlot:
        """A slot for bytes of these sizes, each aligned."""
        return cls(
            slot.name, slot.owner, slot.attribute, torch.Size([sum(map(aligned, sizes))]),
            torch.uint8, slot.shape, slot.dtype,
        )  # fmt: skip


def is_linear(slot: ParameterSlot) -> bool:
    """Tells whether a parameter is a linear layer's weight."""
    return type(slot.owner) is nn.Linear and slot.attribute == "weight"


def load_torchao() -> Any:
    """Imports torchao's quantization, which is part of an extra."""
    try:
        import torchao.quantization
    except ImportError as error:
        raise ValueError(
            "--weight-bits needs torchao; install it with pip install 'h2okv[quant]'"
        ) from error
    return torchao.quantization


def aligned(size: int) -> int:
    """Rounds up to where numbers of any dtype may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_GROUPS = (64, 32)
"""Numbers that share a scale and a zero, the first that divides a row."""
_OUTPUTS = 16
"""The packing takes rows by so many."""


class Int4Slot(PackedSlot):
    """A `PackedSlot` of two numbers in a byte, and a bf16 scale and zero for each group of a row.

    How the bytes lie depends on the vector instructions of the processor that packed them.
    """

    @classmethod
    def of(cls, slot: ParameterSlot) -> ParameterSlot:
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
        """See `ParameterSlot.form`."""
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
    """Imports torchao's int4 tensor for CPUs, which is not among its lasting names."""
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
    """Refuses where torchao's int4 does not work, or is slower than no int4 at all."""
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


class Int8Slot(PackedSlot):
    """A `PackedSlot` of int8 numbers and one fp32 scale for each output."""

    @classmethod
    def of(cls, slot: ParameterSlot) -> ParameterSlot:
        """See `PackedSlot.of`."""
        if not is_linear(slot):
            return slot
        return cls._sized(slot, slot.shape.numel(), 4 * slot.shape[0])

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """See `PackedSlot.to_bytes`."""
        torchao = load_torchao()
        # A zero-point is not among its parts: the quantization is symmetric.
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


WEIGHT_BITS = (8, 4)


def pack_layers(meta: MetaModel, bits: int, device: torch.device) -> MetaModel:
    """Packs the weights of the decoder layers' linear layers."""
    if bits == 4:
        check_int4(device, meta.dtype)
        load_int4()
    load_torchao()
    kind: type[PackedSlot] = Int4Slot if bits == 4 else Int8Slot
    units = [
        replace(unit, slots=tuple(kind.of(slot) for slot in unit.slots))
        if unit.layer_idx is not None
        else unit
        for unit in meta.units
    ]
    if not any(isinstance(slot, PackedSlot) for unit in units for slot in unit.slots):
        raise ValueError(
            f"{type(meta.model).__name__} has no linear layers whose weights could be"
            f" int{bits}; leave out --weight-bits"
        )
    return replace(meta, units=tuple(units))
