"""Reads the next layer's weights while this one computes."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from h2okv.offload.checkpoint import CheckpointFiles, bytes_of
from h2okv.offload.conversion import UnitLayout
from h2okv.offload.meta_model import Unit

_BUFFERS = 2
_ALIGNMENT = 64
_STACK_BYTES = 1 << 20
"""Of the thread that reads; the usual 8 MiB count as data of the process."""


class WeightStream:
    """Two buffers and a thread that reads one unit after the other into them, round and round.

    The thread is always one unit ahead, over the end of a pass too. Nothing is mapped: mapped
    weights count as data of the process, and thrash where they do not fit.
    """

    def __init__(
        self,
        layouts: list[UnitLayout],
        files: CheckpointFiles,
        device: torch.device,
        keep_pages: bool = False,
        hosted: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self._hosted = hosted or {}
        self._layouts = layouts
        self._files = files
        self._keep_pages = keep_pages
        # Each of an odd number of units is in either buffer in turn.
        self._buffers = _make_buffers(arena_bytes([own.buffer_bytes for own in layouts]), device)
        self._free = threading.Semaphore(_BUFFERS)
        self._ready = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_closing = False
        self._next = 0
        self._current: Unit | None = None
        self.bytes_read = 0
        self.wait_seconds = 0.0
        """Time that computing waited for reading."""
        self.read_seconds = 0.0
        """Time that reading took, waiting for a free buffer not counted."""
        self._thread = threading.Thread(target=self._read_all, name="weights", daemon=True)
        usual = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def bring(self, unit: Unit) -> None:
        """Puts a unit's weights into the model, and takes those of the one before out."""
        self.release()
        layout = self._layouts[self._next % len(self._layouts)]
        assert layout.unit is unit, f"{unit.name} out of turn, {layout.unit.name} is next"
        start = time.perf_counter()
        self._ready.acquire()
        self.wait_seconds += time.perf_counter() - start
        if self._error is not None:
            raise self._error
        weights = self._buffers[self._next % _BUFFERS].before_use(layout.buffer_bytes)
        for slot, offset in zip(unit.slots, layout.offsets, strict=True):
            part = weights[offset : offset + slot.nbytes]
            slot.fill(part.view(slot.dtype).view(slot.shape))
        self._next += 1
        self._current = unit

    def release(self) -> None:
        """Gives the buffer of the unit in use back to the thread; call it after a pass."""
        if self._current is None:
            return
        for slot in self._current.slots:
            slot.empty()
        self._current = None
        self._buffers[(self._next - 1) % _BUFFERS].after_use()
        self._free.release()

    def close(self) -> None:
        """Ends the thread."""
        self._is_closing = True
        self._free.release()
        self._thread.join()
        self._current = None

    def _read_all(self) -> None:
        turn = 0
        while True:
            self._free.acquire()
            if self._is_closing:
                return
            try:
                start = time.perf_counter()
                self._read(self._layouts[turn % len(self._layouts)], self._buffers[turn % _BUFFERS])
                self.read_seconds += time.perf_counter() - start
            except BaseException as error:  # handed to the thread that waits
                self._error = error
                self._ready.release()
                return
            self._ready.release()
            turn += 1

    def _read(self, layout: UnitLayout, buffer: Any) -> None:
        hosted = self._hosted.get(layout.unit.name)
        if hosted is not None:
            buffer.copy(hosted)
            return
        target = buffer.before_read(layout.buffer_bytes)
        for piece in layout.pieces:
            part = target[piece.offset : piece.offset + piece.nbytes]
            self._files.read_into(piece.file, piece.start, part)
            self.bytes_read += piece.nbytes
            if not self._keep_pages:
                self._files.drop_pages(piece.file, piece.start, piece.nbytes)
        buffer.after_read(layout.buffer_bytes)


class HostBuffer:
    """A buffer that the model computes from directly."""

    def __init__(self, block: torch.Tensor, is_low: bool) -> None:
        self._block = block
        self._is_low = is_low

    def before_read(self, size: int) -> memoryview:
        """Gives the bytes to read into."""
        return bytes_of(part_of(self._block, size, self._is_low))

    def after_read(self, size: int) -> None:
        """Nothing is left to do."""

    def before_use(self, size: int) -> torch.Tensor:
        """Gives the bytes to compute from."""
        return part_of(self._block, size, self._is_low)

    def after_use(self) -> None:
        """Nothing is left to do."""


class DeviceBuffer:
    """A buffer on an accelerator with a pinned one in front of it and a copy stream between.

    Only the reading thread waits for the device, and only for its own copies.
    """

    def __init__(
        self, block: torch.Tensor, staging: torch.Tensor, is_low: bool, stream: torch.cuda.Stream
    ) -> None:
        self._block = block
        self._staging = staging
        self._is_low = is_low
        self._stream = stream
        self._copied = torch.cuda.Event()
        self._used = torch.cuda.Event()

    def before_read(self, size: int) -> memoryview:
        """Waits until the last copy has left the pinned buffer, and gives its bytes."""
        self._copied.synchronize()
        return bytes_of(part_of(self._staging, size, self._is_low))

    def after_read(self, size: int) -> None:
        """Starts the copy of what was read."""
        self.copy(part_of(self._staging, size, self._is_low))

    def copy(self, source: torch.Tensor) -> None:
        """Starts a copy, behind what still computes with the buffer."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            target = part_of(self._block, len(source), self._is_low)
            target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)

    def before_use(self, size: int) -> torch.Tensor:
        """Makes the computing stream wait for the copy, and gives the bytes."""
        torch.cuda.current_stream(self._block.device).wait_event(self._copied)
        return part_of(self._block, size, self._is_low)

    def after_use(self) -> None:
        """Marks the place in the computing stream after which the buffer is free."""
        self._used.record(torch.cuda.current_stream(self._block.device))


def part_of(block: torch.Tensor, size: int, is_low: bool) -> torch.Tensor:
    """The first or the last bytes of a block, aligned."""
    start = 0 if is_low else len(block) - _aligned(size)
    return block[start : start + size]


def arena_bytes(sizes: list[int]) -> int:
    """Memory of two buffers of which one is filled while the other is in use.

    They lie at the two ends of one block, so that not both need room for the largest unit.
    """
    if not sizes:
        return 0
    following = [*sizes[1:], sizes[0]]
    pairs = [_aligned(a) + _aligned(b) for a, b in zip(sizes, following, strict=True)]
    return max(pairs)


def _make_buffers(size: int, device: torch.device) -> list[Any]:
    """A buffer that grows from each end of a block towards the other."""
    block = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return [HostBuffer(block, is_low) for is_low in (True, False)]
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)
    return [DeviceBuffer(block, staging, is_low, stream) for is_low in (True, False)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
