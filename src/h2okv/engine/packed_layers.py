"""A model whose layers have weights in few bits."""

from __future__ import annotations

from dataclasses import replace

import torch

from h2okv.engine.int4_slot import Int4Slot, check_int4, load_int4
from h2okv.engine.int8_slot import Int8Slot
from h2okv.engine.packed_slot import PackedSlot, load_torchao
from h2okv.engine.skeleton import Skeleton

WEIGHT_BITS = (8, 4)


def pack_layers(skeleton: Skeleton, bits: int, device: torch.device) -> Skeleton:
    """Packs the weights of the decoder layers' linear layers.

    Args:
        skeleton: A model; norms, biases, the embedding and the head stay as they are.
        bits: One of `WEIGHT_BITS`.
        device: Where the model computes.

    Returns:
        The same model with packed slots.

    Raises:
        ValueError: If no weight can be packed, the device or the dtype has no such format, or the
            extra is not installed.
    """
    if bits == 4:
        check_int4(device, skeleton.table.dtype)
        load_int4()
    load_torchao()
    kind: type[PackedSlot] = Int4Slot if bits == 4 else Int8Slot
    units = [
        replace(unit, slots=tuple(kind.of(slot) for slot in unit.slots))
        if unit.layer_idx is not None
        else unit
        for unit in skeleton.units
    ]
    if not any(isinstance(slot, PackedSlot) for unit in units for slot in unit.slots):
        raise ValueError(
            f"{type(skeleton.model).__name__} has no linear layers whose weights could be"
            f" int{bits}; leave out --weight-bits"
        )
    return replace(skeleton, units=tuple(units))
