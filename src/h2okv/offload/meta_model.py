"""A model on the meta device, its units in the order of a forward, and packed linear layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from h2okv.cache.support import auto_model
from h2okv.console import optional
from h2okv.models.loading import drop_stored_modes

_ALIGNMENT = 64

TensorSpec = tuple[torch.Size, torch.dtype]
"""The shape and dtype of a tensor in a block of bytes."""


def block_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of a block of these tensors, each aligned for any dtype."""
    sizes = (shape.numel() * dtype.itemsize for shape, dtype in specs)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def views_of(block: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
    """Yield views of a uint8 block, one for each spec."""
    start = 0
    for shape, dtype in specs:
        size = shape.numel() * dtype.itemsize
        yield block[start : start + size].view(dtype).view(shape)
        start += block_bytes([(shape, dtype)])


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter in the model: the module that owns it, and its attribute there."""

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
        """Convert a loaded parameter to its stored form, in the slot's dtype and shape."""
        return parameter.to(self.dtype).contiguous()

    def fill(self, tensor: torch.Tensor) -> None:
        """Install a tensor; mutates the module."""
        self.owner._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=False)

    def empty(self) -> None:
        """Install a meta tensor, which makes any use of the parameter an error."""
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
    def specs(self) -> list[TensorSpec]:
        return [(slot.shape, slot.dtype) for slot in self.slots]

    def fill(self, block: torch.Tensor) -> None:
        """Install views of a uint8 block; mutates the module."""
        for slot, view in zip(self.slots, views_of(block, self.specs), strict=True):
            slot.fill(view)

    def empty(self) -> None:
        """Install meta tensors; see `ParameterSlot.empty`."""
        for slot in self.slots:
            slot.empty()


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters take no memory, and its units in the order of a forward."""

    model: PreTrainedModel
    units: tuple[Unit, ...]  # the decoder layers, then the output head
    embedding: ParameterSlot
    others: tuple[ParameterSlot, ...]  # such as the last norm and learned positions

    @property
    def slots(self) -> list[ParameterSlot]:
        """All parameters; a tied weight is listed twice."""
        in_units = (slot for unit in self.units for slot in unit.slots)
        return [self.embedding, *self.others, *in_units]

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding share their weights."""
        return any(slot.name == self.embedding.name for slot in self.units[-1].slots)


def make_meta_model(config: PreTrainedConfig, dtype: torch.dtype, source: str) -> MetaModel:
    """Build a model whose parameters take no memory."""
    accelerate = optional("accelerate", "streaming weights", "offload")
    with accelerate.init_empty_weights(include_buffers=False):
        model: Any = auto_model(config).from_config(config, dtype=dtype)
    model.tie_weights()  # moving parameters to the meta device untied them
    # Without such a file the config from from_config stays, as in from_pretrained.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    drop_stored_modes(model)
    return split_model(model.eval())


def split_model(model: PreTrainedModel) -> MetaModel:
    """Split a model into its layers, head and embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    # The decoder layers are the largest module list of the config's number of layers.
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
    _, prefix, layers = max(lists, key=lambda entry: entry[0])
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
    assigned = {id(slot.owner) for unit in units for slot in unit.slots} | {id(embedding)}
    others = tuple(slot for slot in _slots(model, "") if id(slot.owner) not in assigned)
    return MetaModel(model, tuple(units), table, others)


def _slots(module: nn.Module, prefix: str) -> Iterator[ParameterSlot]:
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                full_name = ".".join(filter(None, (prefix, name, attribute)))
                yield ParameterSlot(full_name, owner, attribute, parameter.shape, parameter.dtype)


@dataclass(frozen=True)
class PackedSlot(ParameterSlot):
    """A linear layer's weight, as the bytes of torchao's 8-bit tensor."""

    original_shape: torch.Size  # of the weight, [outputs, inputs]
    original_dtype: torch.dtype  # of products with it

    form = "int8"

    @classmethod
    def of(cls, slot: ParameterSlot) -> ParameterSlot:
        """Return a linear layer's slot as a packed one, or any other unchanged."""
        if type(slot.owner) is not nn.Linear or slot.attribute != "weight":
            return slot
        size = torch.Size([block_bytes(_packed_specs(slot.shape))])
        original = slot.shape, slot.dtype
        return cls(slot.name, slot.owner, slot.attribute, size, torch.uint8, *original)

    @property
    def num_weights(self) -> int:
        return self.original_shape.numel()

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        torchao, (outputs, inputs) = load_torchao(), self.original_shape
        linear = nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(parameter.to(self.original_dtype), requires_grad=False)
        torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
        quantized: Any = linear.weight
        packed = torch.zeros(self.shape, dtype=torch.uint8)
        codes, scales = views_of(packed, _packed_specs(self.original_shape))
        # There is no zero point: the quantization is symmetric.
        codes.copy_(quantized.qdata)
        scales.copy_(quantized.scale.view(scales.shape))
        return packed

    def fill(self, tensor: torch.Tensor) -> None:
        """Install the packed tensor over the parameter, which stays on the meta device."""
        views = views_of(tensor, _packed_specs(self.original_shape))
        row = [1, self.original_shape[1]]  # numbers with one scale
        packed = load_torchao().Int8Tensor(*views, row, self.original_dtype)
        vars(self.owner)[self.attribute] = packed

    def empty(self) -> None:
        vars(self.owner).pop(self.attribute, None)
        super().fill(torch.empty(self.original_shape, dtype=self.original_dtype, device="meta"))


def _packed_specs(shape: torch.Size) -> list[TensorSpec]:
    """Return the tensors stored for a weight: its codes, and a scale for each row."""
    return [(shape, torch.int8), (torch.Size([shape[0], 1]), torch.float32)]


def load_torchao() -> Any:
    """Import torchao's quantization, which comes with an extra."""
    return optional("torchao.quantization", "--weight-bits", "quant")


def pack_layers(meta: MetaModel) -> MetaModel:
    """Pack the weights of the decoder layers' linear layers."""
    load_torchao()
    *layers, head = meta.units
    units = [
        replace(layer, slots=tuple(PackedSlot.of(slot) for slot in layer.slots)) for layer in layers
    ]
    if not any(isinstance(slot, PackedSlot) for unit in units for slot in unit.slots):
        raise ValueError(
            f"{type(meta.model).__name__} has no linear layers whose weights could be int8; leave"
            " out --weight-bits"
        )
    return replace(meta, units=(*units, head))
