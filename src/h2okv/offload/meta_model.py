"""A model on the meta device, in parts in the order of a forward, and linear layers in few bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from h2okv.console import optional
from h2okv.integration.loading import drop_stored_modes

_ALIGNMENT = 64
_GROUPS = (64, 32)  # of int4: numbers that share a scale and a zero, the first that divides a row
_OUTPUTS = 16  # the packing of int4 takes rows by so many

Part = tuple[torch.Size, torch.dtype]
"""A tensor's shape and dtype, for its place among others in one block of bytes."""


def block_bytes(parts: Sequence[Part]) -> int:
    """Bytes of a block with all parts, each where numbers of any dtype may begin."""
    sizes = (shape.numel() * dtype.itemsize for shape, dtype in parts)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def parts_of(block: torch.Tensor, parts: Sequence[Part]) -> Iterator[torch.Tensor]:
    """Views of a uint8 block, one for each part."""
    start = 0
    for shape, dtype in parts:
        size = shape.numel() * dtype.itemsize
        yield block[start : start + size].view(dtype).view(shape)
        start += block_bytes([(shape, dtype)])


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter's place in the model: the module that owns it, and its attribute there."""

    name: str
    owner: nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def form(self) -> str:
        """Storage format; a file in another format has to be converted."""
        return f"{type(self).__name__} {self.dtype}"

    @property
    def num_weights(self) -> int:
        return self.shape.numel()

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """Converts a loaded parameter to what is stored for it: dtype and shape of the slot."""
        return parameter.to(self.dtype).contiguous()

    def fill(self, tensor: torch.Tensor) -> None:
        """Installs a tensor; mutates the module."""
        self.owner._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=False)

    def empty(self) -> None:
        """Installs a meta tensor, so that using the parameter is an error."""
        self.fill(torch.empty(self.shape, dtype=self.dtype, device="meta"))


@dataclass(frozen=True)
class Unit:
    """Parameters that are loaded together: a decoder layer, or the head."""

    name: str
    module: nn.Module
    slots: tuple[ParameterSlot, ...]

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @property
    def parts(self) -> list[Part]:
        return [(slot.shape, slot.dtype) for slot in self.slots]

    def fill(self, block: torch.Tensor) -> None:
        """Installs views of a uint8 block; mutates the module."""
        for slot, part in zip(self.slots, parts_of(block, self.parts), strict=True):
            slot.fill(part)


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters take no memory, and its parts in the order of a forward."""

    model: PreTrainedModel
    units: tuple[Unit, ...]  # the decoder layers, then the output head
    embedding: ParameterSlot
    others: tuple[ParameterSlot, ...]  # such as the last norm and learned positions

    @property
    def slots(self) -> list[ParameterSlot]:
        """All parameters; a tied weight is listed in both places."""
        in_units = (slot for unit in self.units for slot in unit.slots)
        return [self.embedding, *self.others, *in_units]

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding share their weights."""
        return any(slot.name == self.embedding.name for slot in self.units[-1].slots)


def make_meta_model(config: PreTrainedConfig, dtype: torch.dtype, source: str) -> MetaModel:
    """Builds a model whose parameters take no memory."""
    accelerate = optional("accelerate", "streaming weights", "offload")
    with accelerate.init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # parameters were made anew on the way out of memory
    # Without such a file what from_config made of the model's config holds, as in from_pretrained.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    drop_stored_modes(model)
    return split_model(model.eval())


def split_model(model: PreTrainedModel) -> MetaModel:
    """Finds a model's layers, head and embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # The decoder layers are the largest list of the length that the config names.
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    missing = "" if lists else f"no list of {count} decoder layers"
    if not isinstance(head, nn.Module) or id(embedding) not in names:
        missing = "no output head or no embedding"
    if missing:
        raise ValueError(
            f"{type(model).__name__} has {missing} that weights could be streamed to; give"
            " --weights device"
        )
    _, prefix, layers = max(lists, key=lambda found: found[0])
    (table,) = [s for s in _slots(embedding, names[id(embedding)]) if s.attribute == "weight"]
    units = [
        Unit(f"{prefix}.{index}", layer, tuple(_slots(layer, f"{prefix}.{index}")))
        for index, layer in enumerate(layers)
    ]
    head_slots = list(_slots(head, names[id(head)]))
    for number, slot in enumerate(head_slots):
        if slot.owner._parameters[slot.attribute] is embedding.weight:
            head_slots[number] = replace(slot, name=table.name)
    units.append(Unit(names[id(head)], head, tuple(head_slots)))
    taken = {id(slot.owner) for unit in units for slot in unit.slots} | {id(embedding)}
    others = tuple(slot for slot in _slots(model, "") if id(slot.owner) not in taken)
    return MetaModel(model, tuple(units), table, others)


def _slots(module: nn.Module, prefix: str) -> Iterator[ParameterSlot]:
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                full = ".".join(part for part in (prefix, name, attribute) if part)
                yield ParameterSlot(full, owner, attribute, parameter.shape, parameter.dtype)


@dataclass(frozen=True)
class PackedSlot(ParameterSlot):
    """A linear layer's weight, as the bytes of the 8- or 4-bit tensor that torchao takes."""

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
        return self.original_shape.numel()

    @property
    def form(self) -> str:
        """See `ParameterSlot.form`; the bytes of int4 depend on the processor's instructions."""
        processor = torch.backends.cpu.get_cpu_capability() if self.bits == 4 else ""
        return f"int{self.bits} {processor}"

    @property
    def _block_size(self) -> list[int]:
        """The part of the weight that shares a scale: a row, or a group of one."""
        inputs = self.original_shape[1]
        return [1, inputs if self.bits == 8 else _group(inputs)]

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        weight = parameter.to(self.original_dtype)
        packed = torch.zeros(self.shape, dtype=torch.uint8)
        if self.bits == 8:
            torchao = load_torchao()
            outputs, inputs = weight.shape
            linear = nn.Linear(inputs, outputs, bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
            made: Any = linear.weight
            # A zero-point is not among its parts: the quantization is symmetric.
            tensors = made.qdata, made.scale
        else:
            made = load_int4().from_hp(weight, self._block_size)
            tensors = made.qdata, made.scale_and_zero
        for part, tensor in zip(self._parts_of(packed), tensors, strict=True):
            part.copy_(tensor.view(part.shape))
        return packed

    def fill(self, tensor: torch.Tensor) -> None:
        """Installs a tensor that multiplies, over the parameter, which stays on the meta device."""
        kind = load_torchao().Int8Tensor if self.bits == 8 else load_int4()
        last = self.original_dtype if self.bits == 8 else self.original_shape
        vars(self.owner)[self.attribute] = kind(*self._parts_of(tensor), self._block_size, last)

    def empty(self) -> None:
        vars(self.owner).pop(self.attribute, None)
        super().fill(torch.empty(self.original_shape, dtype=self.original_dtype, device="meta"))

    def _parts_of(self, packed: torch.Tensor) -> Iterator[torch.Tensor]:
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


def pack_layers(meta: MetaModel, bits: int, device: torch.device) -> MetaModel:
    """Packs the weights of the decoder layers' linear layers."""
    dtype = str(meta.embedding.dtype).removeprefix("torch.")
    if bits == 4 and device.type != "cpu":
        raise ValueError(
            f"--weight-bits 4 is for CPUs: torchao packs int4 for {device.type} on the device"
            " itself, and not layer by layer from a file; give --weight-bits 8"
        )
    if bits == 4 and dtype != "bfloat16":
        raise ValueError(
            f"--weight-bits 4 is fast in bfloat16 only (in {dtype} a product takes many times as"
            " long as without it); add --dtype bfloat16, or give --weight-bits 8"
        )
    (load_int4 if bits == 4 else load_torchao)()
    *layers, head = meta.units
    units = [
        replace(layer, slots=tuple(PackedSlot.of(slot, bits) for slot in layer.slots))
        for layer in layers
    ]
    if not any(isinstance(slot, PackedSlot) for unit in units for slot in unit.slots):
        raise ValueError(
            f"{type(meta.model).__name__} has no linear layers whose weights could be"
            f" int{bits}; leave out --weight-bits"
        )
    return replace(meta, units=(*units, head))
