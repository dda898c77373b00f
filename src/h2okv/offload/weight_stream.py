"""Gives a meta model its weights: resident, or the next layer read while this one computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch import nn

from h2okv.offload.checkpoint import CheckpointFiles, StoredTensor, block_bytes, bytes_of, parts_of
from h2okv.offload.meta_model import MetaModel, ParameterSlot, Unit

_BUFFERS = 2
_STACK_BYTES = 1 << 20
"""Of the reader thread; the usual 8 MiB count as data of the process."""


class WeightStream:
    """Two buffers and a thread that reads one unit after the other into them, round and round.

    The thread is always one unit ahead, also across weight passes. Units whose weights are in the
    CPU's memory are copied from there.
    """

    def __init__(
        self,
        units: list[Unit],
        reader: WeightReader,
        device: torch.device,
        in_host_memory: dict[str, torch.Tensor],
    ) -> None:
        self.units = units  # in the order of a forward
        self._reader = reader
        self._in_host_memory = in_host_memory
        size, staging, stream = arena_bytes(units), None, None
        block = torch.empty(size, dtype=torch.uint8, device=device)
        if device.type != "cpu":
            staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            stream = torch.cuda.Stream(device)
        # With an odd number of units, each alternates between the buffers.
        self._buffers = [_Buffer(block, is_low, staging, stream) for is_low in (True, False)]
        self._current: Unit | None = None
        self._num_loaded = 0
        self.bytes_read = 0
        self.wait_seconds = 0.0  # that computing waited for reading
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._reads: deque[Future[None]] = deque()
        usual = threading.stack_size(_STACK_BYTES)
        try:
            for number in range(_BUFFERS):
                self._reads.append(self._thread.submit(self._read, number))
        finally:
            threading.stack_size(usual)

    def load(self, unit: Unit) -> None:
        """Installs the next unit's weights, and removes those of the one before."""
        self.release()
        following = self.units[self._num_loaded % len(self.units)]
        assert following is unit, f"{unit.name} out of order, {following.name} is next"
        start = time.perf_counter()
        self._reads.popleft().result()
        self.wait_seconds += time.perf_counter() - start
        unit.fill(self._buffers[self._num_loaded % _BUFFERS].before_use(block_bytes(unit.parts)))
        self._num_loaded += 1
        self._current = unit

    def release(self) -> None:
        """Returns the current unit's buffer to the reader; call it after a weight pass."""
        if self._current is None:
            return
        for slot in self._current.slots:
            slot.empty()
        self._current = None
        self._buffers[(self._num_loaded - 1) % _BUFFERS].after_use()
        self._reads.append(self._thread.submit(self._read, self._num_loaded + _BUFFERS - 1))

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)
        self._current = None

    def _read(self, number: int) -> None:
        """Reads the unit that is used after so many others; in the reader thread."""
        unit, buffer = self.units[number % len(self.units)], self._buffers[number % _BUFFERS]
        host = self._in_host_memory.get(unit.name)
        if host is None:
            host = buffer.before_read(block_bytes(unit.parts))
            self._reader.read(unit, host)
            self.bytes_read += unit.nbytes
        buffer.after_read(host)


@dataclass(frozen=True)
class WeightReader:
    """Reads weights from a checkpoint."""

    files: CheckpointFiles
    found: dict[str, StoredTensor]  # by parameter
    keep_pages: bool = False  # whether the system may keep what was read

    def read(self, unit: Unit, block: torch.Tensor) -> None:
        """Reads a unit into a uint8 block on the CPU, in the order of the file."""
        parts = zip(unit.slots, parts_of(block, unit.parts), strict=True)
        pairs = [(self.found[slot.name], part) for slot, part in parts]
        for stored, part in sorted(pairs, key=lambda pair: (pair[0].file, pair[0].start)):
            self.files.read_into(stored.file, stored.start, bytes_of(part))
            if not self.keep_pages:
                self.files.drop_pages(stored.file, stored.start, stored.nbytes)

    def block(self, unit: Unit, pinned: bool = False) -> torch.Tensor:
        """Reads a unit into memory of its own."""
        block = torch.empty(block_bytes(unit.parts), dtype=torch.uint8, pin_memory=pinned)
        self.read(unit, block)
        return block

    def tensor(self, slot: ParameterSlot) -> torch.Tensor:
        """Reads one parameter."""
        return self.files.read(self.found[slot.name])


class _Buffer:
    """One end of a block, to compute from.

    On an accelerator a pinned buffer is in front of it, and a copy stream between. Only the reader
    thread waits for the device, and only for its own copies.
    """

    def __init__(
        self, block: torch.Tensor, is_low: bool, staging: torch.Tensor | None, stream: Any
    ) -> None:
        self._block = block
        self._is_low = is_low
        self._staging = staging
        self._stream = stream
        if stream is not None:
            self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def before_read(self, size: int) -> torch.Tensor:
        """The bytes to read into, once the last copy has left them."""
        if self._staging is None:
            return self._part_of(self._block, size)
        self._copied.synchronize()
        return self._part_of(self._staging, size)

    def after_read(self, source: torch.Tensor) -> None:
        """Starts to copy what was read, ordered after the last use of the buffer."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            self._part_of(self._block, len(source)).copy_(source, non_blocking=True)
            self._copied.record(self._stream)

    def before_use(self, size: int) -> torch.Tensor:
        """The bytes to compute from; the compute stream waits for their copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self._block.device).wait_event(self._copied)
        return self._part_of(self._block, size)

    def after_use(self) -> None:
        """Records the point in the compute stream after which the buffer is free."""
        if self._stream is not None:
            self._used.record(torch.cuda.current_stream(self._block.device))

    def _part_of(self, block: torch.Tensor, size: int) -> torch.Tensor:
        start = 0 if self._is_low else len(block) - size
        return block[start : start + size]


def arena_bytes(units: list[Unit]) -> int:
    """Memory of two buffers of which one is filled while the other is in use.

    They grow from the two ends of one block, so that not both need room for the largest unit.
    """
    sizes = [block_bytes(unit.parts) for unit in units]
    return max(map(add, sizes, [*sizes[1:], *sizes[:1]]), default=0)


class EmbeddingReader:
    """Reads only the embedding rows of the tokens at hand.

    The module's own forward runs on them, so that families that scale their embeddings still do.
    """

    def __init__(self, slot: ParameterSlot, reader: WeightReader, device: torch.device) -> None:
        self._slot = slot
        self._files, self._stored = reader.files, reader.found[slot.name]
        self._device = device
        self.bytes_read = 0
        module: Any = slot.owner
        # It only stops gradients, and would be out of range in a table of a few rows.
        module.padding_idx = None
        self._clear()
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(lambda *_: self._clear())

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, indices = torch.unique(args[0], return_inverse=True)
        rows = torch.empty((len(tokens), *self._slot.shape[1:]), dtype=self._slot.dtype)
        size = self._stored.nbytes // self._stored.shape[0]
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self._files.read_into(
                self._stored.file, self._stored.start + token * size, bytes_of(row)
            )
        self.bytes_read += rows.nbytes
        self._slot.fill(rows.to(self._device))
        return (indices, *args[1:])

    def _clear(self) -> None:
        """Leaves no rows; on the device, for some models ask where the embedding is."""
        shape = (0, *self._slot.shape[1:])
        self._slot.fill(torch.empty(shape, dtype=self._slot.dtype, device=self._device))


def materialise(
    meta: MetaModel,
    reader: WeightReader,
    places: Sequence[str],
    embedding_place: str,
    device: torch.device,
) -> tuple[WeightStream | None, EmbeddingReader | None]:
    """Loads the resident weights, and starts the stream of the others."""
    _load_buffers(meta, reader, device)
    for slot in meta.others:
        slot.fill(reader.tensor(slot).to(device))
    streamed = []
    in_host_memory: dict[str, torch.Tensor] = {}
    for unit, place in zip(meta.units, places, strict=True):
        if place == "disk" or (place == "cpu" and device.type != "cpu"):
            streamed.append(unit)
            if place == "cpu":
                in_host_memory[unit.name] = reader.block(unit, pinned=True)
        else:
            unit.fill(reader.block(unit).to(device))
    embedding = None
    if meta.is_tied and places[-1] == "device":
        (own,) = [slot for slot in meta.units[-1].slots if slot.name == meta.embedding.name]
        meta.embedding.fill(own.owner.get_parameter(own.attribute).data)
    elif embedding_place == "disk":
        embedding = EmbeddingReader(meta.embedding, reader, device)
    else:
        meta.embedding.fill(reader.tensor(meta.embedding).to(device))
    stream = WeightStream(streamed, reader, device, in_host_memory) if streamed else None
    return stream, embedding


def _load_buffers(meta: MetaModel, reader: WeightReader, device: torch.device) -> None:
    """Reads the buffers that the checkpoint holds; others are as the model made them."""
    for name, buffer in meta.model.named_buffers():
        if name in reader.found:
            buffer.copy_(reader.files.read(reader.found[name]))
    for module in meta.model.modules():
        for name, held in module._buffers.items():
            if held is not None:
                module._buffers[name] = held.to(device)
