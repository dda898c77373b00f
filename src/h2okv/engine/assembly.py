"""A skeleton brought to life: what stays in memory is read, what streams is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from h2okv.engine.cache_store import CacheStore
from h2okv.engine.checkpoint_files import CheckpointFiles, Stored, bytes_of
from h2okv.engine.placement import Placement
from h2okv.engine.row_table import RowTable
from h2okv.engine.skeleton import Skeleton, Slot
from h2okv.engine.weight_map import UnitLayout, lay_out
from h2okv.engine.weight_stream import WeightStream
from h2okv.engine.zigzag import ZigZag


@dataclass(frozen=True)
class Assembled:
    """A model that can run.

    Attributes:
        skeleton: The model and its parts.
        passing: Runs its forwards.
        stream: Brings weights; ``None`` if all are in memory.
        table: Reads rows of the embedding; ``None`` if it is in memory.
        resident_bytes: Weights in the memory of the device.
    """

    skeleton: Skeleton
    passing: ZigZag
    stream: WeightStream | None
    table: RowTable | None
    resident_bytes: int

    @property
    def bytes_read(self) -> int:
        """Weights read from the disk since the model was assembled."""
        parts = (self.stream, self.table)
        return sum(part.bytes_read for part in parts if part is not None)

    def close(self) -> None:
        """Ends reading."""
        self.passing.close()


def assemble(
    skeleton: Skeleton,
    files: CheckpointFiles,
    found: dict[str, Stored],
    placement: Placement,
    device: torch.device,
    store: CacheStore | None = None,
    keep_pages: bool = False,
) -> Assembled:
    """Reads what stays, and starts the stream of what does not.

    Args:
        skeleton: Mutated: its resident parameters are filled.
        files: The checkpoint.
        found: From `map_weights`.
        placement: Where each part goes.
        device: Where the model computes.
        store: Where caches are between layers.
        keep_pages: Whether the system may keep what is streamed in memory that is free.

    Returns:
        The model, ready to run.

    Raises:
        ValueError: If a file cannot be read.
    """
    reader = _Reader(files, found, device)
    for name, buffer in skeleton.model.named_buffers():
        _fill_buffer(buffer, found.get(name), files)
    _move_buffers(skeleton, device)
    for slot in skeleton.rest:
        slot.fill(reader.tensor(slot))
    layouts = {index: lay_out(unit, found) for index, unit in enumerate(skeleton.units)}
    on_host = set(placement.indices("cpu")) if device.type != "cpu" else set()
    streamed = sorted({*placement.indices("disk"), *on_host})
    hosted: dict[str, torch.Tensor] = {}
    for index, unit in enumerate(skeleton.units):
        if index in on_host:
            hosted[unit.name] = reader.block(layouts[index], pinned=True)
        elif index not in streamed:
            block = reader.block(layouts[index]).to(device)
            for slot, offset in zip(unit.slots, layouts[index].offsets, strict=True):
                part = block[offset : offset + slot.nbytes]
                slot.fill(part.view(slot.dtype).view(slot.shape))
    table = _place_table(skeleton, files, found, placement, device, reader)
    stream = None
    if streamed:
        order = [layouts[index] for index in streamed]
        stream = WeightStream(order, files, device, keep_pages, hosted)
    passing = ZigZag(skeleton.units, streamed, stream, store)
    return Assembled(skeleton, passing, stream, table, reader.num_bytes)


class _Reader:
    """Reads parameters that stay."""

    def __init__(
        self, files: CheckpointFiles, found: dict[str, Stored], device: torch.device
    ) -> None:
        self._files = files
        self._found = found
        self._device = device
        self.num_bytes = 0

    def tensor(self, slot: Slot) -> torch.Tensor:
        """One parameter, on the device."""
        host = torch.empty(slot.shape, dtype=slot.dtype)
        _read(self._files, self._found[slot.name], host)
        self.num_bytes += slot.nbytes
        return host.to(self._device)

    def block(self, layout: UnitLayout, pinned: bool = False) -> torch.Tensor:
        """A unit as it would lie in a buffer, uint8 on the CPU."""
        host = torch.empty(layout.buffer_bytes, dtype=torch.uint8, pin_memory=pinned)
        target = bytes_of(host)
        for piece in layout.pieces:
            part = target[piece.offset : piece.offset + piece.nbytes]
            self._files.read_into(piece.file, piece.start, part)
            self._files.drop_pages(piece.file, piece.start, piece.nbytes)
        self.num_bytes += layout.buffer_bytes
        return host


def _place_table(
    skeleton: Skeleton,
    files: CheckpointFiles,
    found: dict[str, Stored],
    placement: Placement,
    device: torch.device,
    reader: _Reader,
) -> RowTable | None:
    """Brings the input embedding to its place."""
    slot, head = skeleton.table, skeleton.units[-1]
    if skeleton.is_tied and placement.units[-1] == "device":
        # One tensor for both.
        (own,) = [s for s in head.slots if s.name == slot.name]
        shared: Any = own.owner._parameters[own.attribute]
        slot.fill(shared.data)
        return None
    if placement.table != "disk":
        slot.fill(reader.tensor(slot))
        return None
    return RowTable(slot, found[slot.name], files, device)


def _fill_buffer(buffer: torch.Tensor, stored: Stored | None, files: CheckpointFiles) -> None:
    """Reads a buffer that the checkpoint holds; others are as the model made them."""
    if stored is None:
        return
    host = torch.empty(stored.shape, dtype=stored.dtype)
    _read(files, stored, host)
    buffer.copy_(host)


def _move_buffers(skeleton: Skeleton, device: torch.device) -> None:
    for module in skeleton.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _read(files: CheckpointFiles, stored: Stored, host: torch.Tensor) -> None:
    files.read_into(stored.file, stored.start, bytes_of(host))
