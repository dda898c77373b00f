"""Linear layers in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from h2okv.console import optional
from h2okv.offload.checkpoint import Part, block_bytes, parts_of
from h2okv.offload.meta_model import MetaModel, ParameterSlot

_GROUPS = (64, 32)
"""Of int4: numbers that share a scale and a zero, the first that divides a row."""
_OUTPUTS = 16
"""The packing of int4 takes rows by so many."""


@dataclass(frozen=True)
class PackedSlot(ParameterSlot):
    """A linear layer's weight, stored as the bytes of a tensor that torchao multiplies with.

    In 8 bits these are int8 numbers and an fp32 scale for each output; in 4 bits two numbers in a
    byte, and a scale and zero for each group of a row.
    """

    original_shape: torch.Size  # of the weight, [outputs, inputs]
    original_dtype: torch.dtype  # that products with it have
    bits: int

    @classmethod
    def of(cls, slot: ParameterSlot, bits: int) -> ParameterSlot:
        """Makes a linear layer's slot a packed one; one that cannot be packed is given back."""
        is_linear = type(slot.owner) is nn.Linear and slot.attribute == "weight"
        parts = _parts(slot.shape, slot.dtype, bits) if is_linear else []
        if not parts:
            return slot
        size = torch.Size([block_bytes(parts)])
        original = slot.shape, slot.dtype
        return cls(slot.name, slot.owner, slot.attribute, size, torch.uint8, *original, bits)

    @property
    def num_weights(self) -> int:
        """See `ParameterSlot.num_weights`."""
        return self.original_shape.numel()

    @property
    def form(self) -> str:
        """See `ParameterSlot.form`; the bytes of int4 depend on the processor's instructions."""
        processor = torch.backends.cpu.get_cpu_capability() if self.bits == 4 else ""
        return f"int{self.bits} {processor}"

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """Quantizes a weight; uint8."""
        weight = parameter.to(self.original_dtype)
        packed = torch.zeros(self.shape, dtype=torch.uint8)
        made = _quantize8(weight) if self.bits == 8 else _quantize4(weight)
        for part, tensor in zip(self._parts_of(packed), made, strict=True):
            part.copy_(tensor.view(part.shape))
        return packed

    def fill(self, tensor: torch.Tensor) -> None:
        """Installs the stored bytes, shared, as a tensor that multiplies; mutates the module.

        It hides the parameter, which stays on the meta device: code that walks through a model's
        parameters expects ordinary tensors.
        """
        parts, inputs = self._parts_of(tensor), self.original_shape[1]
        if self.bits == 8:
            weight = load_torchao().Int8Tensor(*parts, [1, inputs], self.original_dtype)
        else:
            weight = load_int4()(*parts, [1, _group(inputs)], self.original_shape)
        vars(self.owner)[self.attribute] = weight

    def empty(self) -> None:
        """See `ParameterSlot.empty`."""
        vars(self.owner).pop(self.attribute, None)
        meta_tensor = torch.empty(self.original_shape, dtype=self.original_dtype, device="meta")
        super().fill(meta_tensor)

    def _parts_of(self, packed: torch.Tensor) -> Iterable[torch.Tensor]:
        return parts_of(packed, _parts(self.original_shape, self.original_dtype, self.bits))


def _parts(shape: torch.Size, dtype: torch.dtype, bits: int) -> list[Part]:
    """The tensors that are stored for a weight; none if it cannot be packed."""
    outputs, inputs = shape
    if bits == 8:
        return [(shape, torch.int8), (torch.Size([outputs, 1]), torch.float32)]
    if outputs % _OUTPUTS or inputs % min(_GROUPS):
        return []
    codes = torch.Size([outputs, inputs // 2])
    return [(codes, torch.uint8), (torch.Size([inputs // _group(inputs), outputs, 2]), dtype)]


def _quantize8(weight: torch.Tensor) -> Iterable[torch.Tensor]:
    torchao = load_torchao()
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    made: Any = linear.weight
    # A zero-point is not among its parts: the quantization is symmetric.
    return made.qdata, made.scale


def _quantize4(weight: torch.Tensor) -> Iterable[torch.Tensor]:
    made: Any = load_int4().from_hp(weight, [1, _group(weight.shape[1])])
    return made.qdata, made.scale_and_zero


def _group(inputs: int) -> int:
    return next(group for group in _GROUPS if inputs % group == 0)


def load_torchao() -> Any:
    """Imports torchao's quantization, which is part of an extra."""
    return optional("torchao.quantization", "--weight-bits", "quant")


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


WEIGHT_BITS = (8, 4)


def pack_layers(meta: MetaModel, bits: int, device: torch.device) -> MetaModel:
    """Packs the weights of the decoder layers' linear layers."""
    if bits == 4:
        # Where torchao's int4 does not work, or is slower than no int4 at all.
        if device.type != "cpu":
            raise ValueError(
                f"--weight-bits 4 is for CPUs: torchao packs int4 for {device.type} on the device"
                " itself, and not layer by layer from a file; give --weight-bits 8"
            )
        if meta.embedding.dtype != torch.bfloat16:
            name = str(meta.embedding.dtype).removeprefix("torch.")
            raise ValueError(
                f"--weight-bits 4 is fast in bfloat16 only (in {name} a product takes many times"
                " as long as without it); add --dtype bfloat16, or give --weight-bits 8"
            )
        load_int4()
    load_torchao()
    units = []
    for unit in meta.units:
        if unit.layer_idx is not None:
            unit = replace(unit, slots=tuple(PackedSlot.of(slot, bits) for slot in unit.slots))
        units.append(unit)
    if not any(isinstance(slot, PackedSlot) for unit in units for slot in unit.slots):
        raise ValueError(
            f"{type(meta.model).__name__} has no linear layers whose weights could be"
            f" int{bits}; leave out --weight-bits"
        )
    return replace(meta, units=tuple(units))
