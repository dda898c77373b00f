"""A model whose layers' weights come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from h2okv.offload.batch_runner import MicroBatch
from h2okv.offload.checkpoint import CheckpointFiles, Stored, bytes_of
from h2okv.offload.conversion import UnitLayout, lay_out
from h2okv.offload.kv_tiers import CacheStore
from h2okv.offload.meta_model import Skeleton, Slot, Unit
from h2okv.offload.planner import Placement
from h2okv.offload.weight_stream import WeightStream


class RowTable:
    """Gives the embedding module the rows that it is about to look up.

    The module's own forward runs on them, so that families that scale their embeddings do.
    """

    def __init__(
        self, slot: Slot, stored: Stored, files: CheckpointFiles, device: torch.device
    ) -> None:
        self._slot = slot
        self._stored = stored
        self._files = files
        self._device = device
        self._row_bytes = stored.nbytes // stored.shape[0]
        self.bytes_read = 0
        module: Any = slot.owner
        # It only stops gradients, and would be out of range in a table of a few rows.
        module.padding_idx = None
        self._leave_nothing()
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, places = torch.unique(args[0], return_inverse=True)
        rows = torch.empty((len(tokens), *self._slot.shape[1:]), dtype=self._slot.dtype)
        target = bytes_of(rows)
        size = self._row_bytes
        for index, token in enumerate(tokens.tolist()):
            part = target[index * size : (index + 1) * size]
            self._files.read_into(self._stored.file, self._stored.start + token * size, part)
        self.bytes_read += len(tokens) * size
        self._slot.fill(rows.to(self._device))
        return (places, *args[1:])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._leave_nothing()

    def _leave_nothing(self) -> None:
        """A table without rows; on the device, for some models ask where it is."""
        shape = (0, *self._slot.shape[1:])
        self._slot.fill(torch.empty(shape, dtype=self._slot.dtype, device=self._device))


class ZigZag:
    """A `Passing` over units of which some are streamed."""

    def __init__(
        self,
        units: tuple[Unit, ...],
        streamed: list[int],
        stream: WeightStream | None,
        store: CacheStore | None = None,
    ) -> None:
        self._units = units
        self._streamed = frozenset(streamed)
        self._stream = stream
        self.store = store
        self._greenlets = load_greenlet()
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._stop_before(index), with_kwargs=True)

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `Passing.run`."""
        lanes = [_Lane(batch, self._greenlets, model) for batch in batches]
        try:
            for lane in lanes:
                lane.go_on()
            while any(lane.stop is not None for lane in lanes):
                index = min(lane.stop for lane in lanes if lane.stop is not None)
                if index in self._streamed:
                    assert self._stream is not None
                    self._stream.bring(self._units[index])
                self._pass_unit(index, [lane for lane in lanes if lane.stop == index])
            if self._stream is not None:
                self._stream.release()
        finally:
            for lane in lanes:
                lane.end()
        for lane in lanes:
            yield lane.batch, lane.logits

    def forget(self, batch: MicroBatch) -> None:
        """See `Passing.forget`."""
        if self.store is not None:
            self.store.forget(batch.cache)

    def close(self) -> None:
        """Ends reading."""
        if self._stream is not None:
            self._stream.close()
        if self.store is not None:
            self.store.close()

    def _pass_unit(self, index: int, lanes: list[_Lane]) -> None:
        layer = self._units[index].layer_idx
        if self.store is None or layer is None:
            for lane in lanes:
                lane.go_on()
            return
        following = [(lane, layer) for lane in lanes[1:]] + [(lanes[0], layer + 1)]
        for lane, (other, later) in zip(lanes, following, strict=True):
            self.store.bring(lane.batch.cache, layer)
            if later < len(lane.batch.cache.layers):
                self.store.expect(other.batch.cache, later)
            lane.go_on()
            self.store.put_back(lane.batch.cache, layer)

    def _stop_before(self, index: int) -> Callable[..., Any]:
        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            lane = self._greenlets.getcurrent()
            if lane.parent is not None:
                lane.parent.switch(index)
            # With strided input a bf16 product on a CPU copies the weights once for each sequence.
            return tuple(a.contiguous() if torch.is_tensor(a) else a for a in args), kwargs

        return stop


class _Lane:
    """One micro-batch's forward, stopped before a unit or over."""

    def __init__(self, batch: MicroBatch, greenlets: Any, model: PreTrainedModel) -> None:
        self.batch = batch
        self.stop: int | None = None
        self._greenlet = greenlets.greenlet(lambda: batch.forward(model))

    def go_on(self) -> None:
        """Runs up to the next unit, or to the end."""
        result = self._greenlet.switch()
        if self._greenlet.dead:
            self.stop, self.logits = None, result
        else:
            self.stop = result

    def end(self) -> None:
        """Unwinds a forward that did not come to its end."""
        if not self._greenlet.dead:
            self._greenlet.throw()


def load_greenlet() -> Any:
    """Imports greenlet, which is part of an extra."""
    try:
        import greenlet
    except ImportError as error:
        raise ValueError(
            "weights and caches outside the memory need greenlet; install it with pip install"
            " 'h2okv[offload]'"
        ) from error
    return greenlet


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
    """Reads what stays, and starts the stream of what does not."""
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
