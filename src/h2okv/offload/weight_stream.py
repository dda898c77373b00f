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
"""Of the reader thread; the usual 8 MiB count as data of the process."""


class WeightStream:
    """Two buffers and a thread that reads one unit after the other into them, round and round.

    The thread is always one unit ahead, also across weight passes. Nothing is memory-mapped:
    mapped weights count as data of the process, and thrash where they do not fit.

    Attributes:
        bytes_read: From the disk so far.
        wait_seconds: Time that computing waited for reading.
    """

    def __init__(
        self,
        layouts: list[UnitLayout],
        files: CheckpointFiles,
        device: torch.device,
        keep_pages: bool = False,
        in_host_memory: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self._in_host_memory = in_host_memory or {}
        self._layouts = layouts
        self._files = files
        self._keep_pages = keep_pages
        # With an odd number of units, each alternates between the buffers.
        self._buffers = _make_buffers(arena_bytes([own.buffer_bytes for own in layouts]), device)
        self._free = threading.Semaphore(_BUFFERS)
        self._ready = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_closing = False
        self._next = 0
        self._current: Unit | None = None
        self.bytes_read = 0
        self.wait_seconds = 0.0
        self._thread = threading.Thread(target=self._read_all, name="weights", daemon=True)
        usual = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def load(self, unit: Unit) -> None:
        """Installs the next unit's weights, and removes those of the one before."""
        self.release()
        layout = self._layouts[self._next % len(self._layouts)]
        assert layout.unit is unit, f"{unit.name} out of order, {layout.unit.name} is next"
        start = time.perf_counter()
        self._ready.acquire()
        self.wait_seconds += time.perf_counter() - start
        if self._error is not None:
            raise self._error
        layout.fill(self._buffers[self._next % _BUFFERS].before_use(layout.buffer_bytes))
        self._next += 1
        self._current = unit

    def release(self) -> None:
        """Returns the current unit's buffer to the reader; call it after a weight pass."""
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
                self._read(self._layouts[turn % len(self._layouts)], self._buffers[turn % _BUFFERS])
            except BaseException as error:  # raised in the thread that waits
                self._error = error
                self._ready.release()
                return
            self._ready.release()
            turn += 1

    def _read(self, layout: UnitLayout, buffer: Any) -> None:
        in_host_memory = self._in_host_memory.get(layout.unit.name)
        if in_host_memory is not None:
            buffer.copy(in_host_memory)
            return
        target = buffer.before_read(layout.buffer_bytes)
        for own in layout.extents:
            part = target[own.offset : own.offset + own.nbytes]
            self._files.read_into(own.file, own.start, part)
            self.bytes_read += own.nbytes
            if not self._keep_pages:
                self._files.drop_pages(own.file, own.start, own.nbytes)
        buffer.after_read(layout.buffer_bytes)


class HostBuffer:
    """A buffer that the CPU computes from directly."""

    def __init__(self, block: torch.Tensor, is_low: bool) -> None:
        self._block = block
        self._is_low = is_low

    def before_read(self, size: int) -> memoryview:
        """The bytes to read into."""
        return bytes_of(_part_of(self._block, size, self._is_low))

    def after_read(self, size: int) -> None:
        """Nothing is left to do."""

    def before_use(self, size: int) -> torch.Tensor:
        """The bytes to compute from."""
        return _part_of(self._block, size, self._is_low)

    def after_use(self) -> None:
        """Nothing is left to do."""


class DeviceBuffer:
    """A buffer on an accelerator, a pinned one in front of it, and a copy stream between.

    Only the reader thread waits for the device, and only for its own copies.
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
        """The pinned bytes to read into, once the last copy has left them."""
        self._copied.synchronize()
        return bytes_of(_part_of(self._staging, size, self._is_low))

    def after_read(self, size: int) -> None:
        """Starts the copy of what was read."""
        self.copy(_part_of(self._staging, size, self._is_low))

    def copy(self, source: torch.Tensor) -> None:
        """Starts a copy, ordered after the last use of the buffer."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            target = _part_of(self._block, len(source), self._is_low)
            target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)

    def before_use(self, size: int) -> torch.Tensor:
        """The bytes to compute from; the compute stream waits for their copy."""
        torch.cuda.current_stream(self._block.device).wait_event(self._copied)
        return _part_of(self._block, size, self._is_low)

    def after_use(self) -> None:
        """Records the point in the compute stream after which the buffer is free."""
        self._used.record(torch.cuda.current_stream(self._block.device))


def arena_bytes(sizes: list[int]) -> int:
    """Memory of two buffers of which one is filled while the other is in use.

    They grow from the two ends of one block, so that not both need room for the largest unit.
    """
    if not sizes:
        return 0
    following = [*sizes[1:], sizes[0]]
    return max(_aligned(a) + _aligned(b) for a, b in zip(sizes, following, strict=True))


def _make_buffers(size: int, device: torch.device) -> list[Any]:
    block = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return [HostBuffer(block, is_low) for is_low in (True, False)]
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)
    return [DeviceBuffer(block, staging, is_low, stream) for is_low in (True, False)]


def _part_of(block: torch.Tensor, size: int, is_low: bool) -> torch.Tensor:
    """The first or the last bytes of a block, aligned."""
    start = 0 if is_low else len(block) - _aligned(size)
    return block[start : start + size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
