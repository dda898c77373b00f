"""Linear layers with weights in few bits: less to read, by torchao's own tensors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from h2okv.engine.skeleton import Slot

_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedSlot(Slot):
    """A linear layer's weight, stored as the bytes of a tensor that torchao multiplies with.

    Attributes:
        original_shape: Of the weight, ``[outputs, inputs]``.
        original_dtype: That products with it have.
    """

    original_shape: torch.Size
    original_dtype: torch.dtype

    @classmethod
    @abstractmethod
    def of(cls, slot: Slot) -> Slot:
        """Makes a linear layer's slot a packed one; one that cannot be packed is given back."""

    @abstractmethod
    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """Quantises a weight; uint8."""

    @abstractmethod
    def as_weight(self, packed: torch.Tensor) -> torch.Tensor:
        """Makes of stored bytes, shared and not copied, a tensor that multiplies."""

    @property
    def count(self) -> int:
        """See `Slot.count`."""
        return self.original_shape.numel()

    def fill(self, tensor: torch.Tensor) -> None:
        """Puts the stored bytes there as a tensor that multiplies; mutates the module.

        It hides the parameter, which stays without numbers: whoever looks through a model's
        parameters expects ordinary tensors.
        """
        vars(self.owner)[self.attribute] = self.as_weight(tensor)

    def empty(self) -> None:
        """See `Slot.empty`."""
        vars(self.owner).pop(self.attribute, None)
        hollow = torch.empty(self.original_shape, dtype=self.original_dtype, device="meta")
        super().fill(hollow)

    @classmethod
    def _sized(cls, slot: Slot, *sizes: int) -> PackedSlot:
        """A slot for bytes of these sizes, each aligned."""
        return cls(
            slot.name, slot.owner, slot.attribute, torch.Size([sum(map(aligned, sizes))]),
            torch.uint8, slot.shape, slot.dtype,
        )  # fmt: skip


def is_linear(slot: Slot) -> bool:
    """Tells whether a parameter is a linear layer's weight."""
    return type(slot.owner) is nn.Linear and slot.attribute == "weight"


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


def aligned(size: int) -> int:
    """Rounds up to where numbers of any dtype may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
