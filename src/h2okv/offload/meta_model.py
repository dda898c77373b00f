"""A model on the meta device, to be filled layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from h2okv.offload.checkpoint import Part, import_extra, parts_of


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
        """Stored size."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def form(self) -> str:
        """Storage format; a file in another format has to be converted."""
        return f"{type(self).__name__} {self.dtype}"

    @property
    def num_weights(self) -> int:
        """Numbers of the parameter, however they are stored."""
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
    """Parameters that are loaded together: a decoder layer, or the head (``layer_idx=None``)."""

    name: str
    module: nn.Module
    layer_idx: int | None
    slots: tuple[ParameterSlot, ...]

    @property
    def nbytes(self) -> int:
        """Size of its weights."""
        return sum(slot.nbytes for slot in self.slots)

    @property
    def parts(self) -> list[Part]:
        """Its weights' places in a block of bytes."""
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
    accelerate = import_extra("accelerate", "streaming weights", "offload")
    with accelerate.init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # parameters were made anew on the way out of memory
    # Without such a file what from_config made of the model's config holds, as in from_pretrained.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    model.generation_config.cache_implementation = None
    return split_model(model.eval())


def split_model(model: PreTrainedModel) -> MetaModel:
    """Finds a model's layers, head and embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    prefix, layers = _find_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    if not isinstance(head, nn.Module) or id(embedding) not in names:
        raise ValueError(
            f"{type(model).__name__} has no output head or no embedding that weights could be"
            " streamed to; give --weights device"
        )
    (table,) = [s for s in _slots(embedding, names[id(embedding)]) if s.attribute == "weight"]
    units = [
        Unit(f"{prefix}.{index}", layer, index, tuple(_slots(layer, f"{prefix}.{index}")))
        for index, layer in enumerate(layers)
    ]
    head_slots = tuple(_slots(head, names[id(head)]))
    if head.weight is embedding.weight:
        head_slots = tuple(
            replace(slot, name=table.name)
            if slot.owner is head and slot.attribute == "weight"
            else slot
            for slot in head_slots
        )
    units.append(Unit(names[id(head)], head, None, head_slots))
    taken = {id(slot.owner) for unit in units for slot in unit.slots} | {id(embedding)}
    others = tuple(slot for slot in _slots(model, "") if id(slot.owner) not in taken)
    return MetaModel(model, tuple(units), table, others)


def _slots(module: nn.Module, prefix: str) -> Iterator[ParameterSlot]:
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                full = ".".join(part for part in (prefix, name, attribute) if part)
                yield ParameterSlot(full, owner, attribute, parameter.shape, parameter.dtype)


def _find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Finds the decoder layers: the largest list of the length that the config names."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of {count} decoder layers that weights could be"
            " streamed to; give --weights device"
        )
    _, name, layers = max(lists, key=lambda found: found[0])
    return name, layers
