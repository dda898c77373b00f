"""What would run a layer's operations here, without a model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from h2okv.ops.dispatch import block_operations, step_operation
from h2okv.ops.step import Slots, StepRules


class Finding(NamedTuple):
    """One operation on one device in one dtype.

    Attributes:
        operation: ``"block"`` (a prompt or a turn) or ``"step"`` (a single token).
        device: where.
        dtype: of keys and values.
        used: the implementation.
        why: in a few words.
    """

    operation: str
    device: torch.device
    dtype: torch.dtype
    used: str
    why: str


def survey(device: torch.device, dtype: torch.dtype, size: int, groups: int) -> list[Finding]:
    """Asks for each operation what would be taken.

    Args:
        device: where the layer would be.
        dtype: of its keys and values.
        size: D, and Dv.
        groups: G.

    Returns:
        One finding for each operation, of a cache whose slots are all taken.

    Raises:
        ValueError: if an implementation was asked for that cannot work there.
    """
    block = block_operations(device, dtype, size, size, groups)
    shape = 2, 2, 4
    positions = torch.arange(3, -1, -1, device=device, dtype=torch.int32) - 1
    slots = Slots(
        torch.zeros(*shape, size, device=device, dtype=dtype),
        torch.zeros(*shape, size, device=device, dtype=dtype),
        torch.zeros(shape, device=device),
        positions.repeat(2, 2, 1),
        torch.full((2, 2, 1), 3, device=device),
        torch.full((2,), 3, device=device),
    )
    rules = StepRules(size**-0.5, torch.ones(2, 1, 1, dtype=torch.int64, device=device), full=True)
    step = step_operation(slots, rules, groups)
    return [
        Finding("block", device, dtype, block.name, block.why),
        Finding("step", device, dtype, step.name, step.why),
    ]
