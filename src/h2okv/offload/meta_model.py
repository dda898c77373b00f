"""A model without memory, to be filled layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the model.

    Attributes:
        name: In the model, such as ``model.layers.0.mlp.up_proj.weight``.
        owner: The module that has it.
        attribute: Its name there.
        shape: Of the parameter.
        dtype: Of its numbers.
    """

    name: str
    owner: nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def form(self) -> str:
        """Says how its bytes lie; a file of another form must be written anew."""
        return f"{type(self).__name__} {self.dtype}"

    @property
    def count(self) -> int:
        """How many numbers it stands for."""
        return self.shape.numel()

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """Makes of a loaded parameter what is stored for it: dtype and shape of the slot."""
        return parameter.to(self.dtype).contiguous()

    def fill(self, tensor: torch.Tensor) -> None:
        """Puts a tensor there; mutates the module."""
        self.owner._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=False)

    def empty(self) -> None:
        """Leaves a parameter without numbers, so that a use out of turn is an error."""
        hollow = torch.empty(self.shape, dtype=self.dtype, device="meta")
        self.fill(hollow)


@dataclass(frozen=True)
class Unit:
    """A part of the model whose weights come and go together.

    Attributes:
        name: Of the module.
        module: A decoder layer, or the output head.
        layer_idx: The layer's index; ``None`` for the head.
        slots: Its parameters.
    """

    name: str
    module: nn.Module
    layer_idx: int | None
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        """Of its weights."""
        return sum(slot.nbytes for slot in self.slots)


@dataclass(frozen=True)
class Skeleton:
    """A model's parts in the order of a forward.

    Attributes:
        model: Its parameters hold nothing, its buffers are as they should be.
        units: The decoder layers and the output head.
        table: The input embedding.
        rest: All other parameters: norms, learned positions.
    """

    model: PreTrainedModel
    units: tuple[Unit, ...]
    table: Slot
    rest: tuple[Slot, ...]

    @property
    def slots(self) -> list[Slot]:
        """All parameters; tied weights are there twice, once for each place."""
        return [self.table, *self.rest, *(slot for unit in self.units for slot in unit.slots)]

    @property
    def is_tied(self) -> bool:
        """Whether the head's weights are the embedding's."""
        return any(slot.name == self.table.name for slot in self.units[-1].slots)

    @property
    def head_name(self) -> str:
        """What the head's weight is called where it is not the embedding's."""
        return f"{self.units[-1].name}.weight"


def make_skeleton(config: PreTrainedConfig, dtype: torch.dtype, source: str) -> Skeleton:
    """Builds a model whose parameters take no memory."""
    with _hollow_parameters():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # parameters were made anew on the way out of memory
    # Without such a file what from_config made of the model's config holds, as in from_pretrained.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    model.generation_config.cache_implementation = None
    return split_model(model.eval())


def split_model(model: PreTrainedModel) -> Skeleton:
    """Finds a model's parts."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    prefix, layers = _find_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    if not isinstance(head, nn.Module) or id(table) not in names:
        raise ValueError(
            f"{type(model).__name__} has no output head or no embedding that weights could be"
            " brought to; give --weights device"
        )
    table_name = f"{names[id(table)]}.weight"
    units = [
        Unit(f"{prefix}.{index}", layer, index, tuple(_slots(layer, f"{prefix}.{index}")))
        for index, layer in enumerate(layers)
    ]
    tied = head.weight is table.weight
    head_slots = tuple(_slots(head, names[id(head)]))
    if tied:
        head_slots = tuple(
            Slot(table_name, s.owner, s.attribute, s.shape, s.dtype)
            if s.attribute == "weight" and s.owner is head
            else s
            for s in head_slots
        )
    units.append(Unit(names[id(head)], head, None, head_slots))
    taken = {id(slot.owner) for unit in units for slot in unit.slots} | {id(table)}
    rest = tuple(slot for slot in _slots(model, "") if id(slot.owner) not in taken)
    (table_slot,) = [s for s in _slots(table, names[id(table)]) if s.attribute == "weight"]
    return Skeleton(model, tuple(units), table_slot, rest)


def _slots(module: nn.Module, prefix: str) -> Iterator[Slot]:
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                full = ".".join(part for part in (prefix, name, attribute) if part)
                yield Slot(full, owner, attribute, parameter.shape, parameter.dtype)


def _find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: as long as the config says, and most of the model."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of {count} decoder layers that weights could be"
            " brought to one by one; give --weights device"
        )
    _, name, layers = max(lists, key=lambda found: found[0])
    return name, layers


def _hollow_parameters() -> Any:
    """Parameters without memory, buffers with: what accelerate has made for this."""
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise ValueError(
            "streaming weights needs accelerate; install it with pip install 'h2okv[offload]'"
        ) from error
    return init_empty_weights(include_buffers=False)
