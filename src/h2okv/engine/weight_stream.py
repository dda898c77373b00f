"""Weights that come from the disk while the layers before them compute."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from h2okv.engine.checkpoint_files import CheckpointFiles, bytes_of
from h2okv.engine.skeleton import Unit
from h2okv.engine.weight_map import UnitLayout

_BUFFERS = 2


class WeightStream:
    """Two buffers and a thread that reads one unit after the other into them, round and round.

    The thread is always one unit ahead, over the end of a pass too. Nothing is mapped: mapped
    weights count as data of the process, and thrash where they do not fit.

    Args:
        layouts: The units that are streamed, in the order of a forward.
        files: The checkpoint.
        device: Where the model computes.
        keep_pages: Whether the system may keep what was read in memory that is free.
        hosted: Units' bytes that lie in the CPU's memory, for a model on another device; by the
            unit's name, pinned.
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
        size = max(layout.buffer_bytes for layout in layouts)
        self._buffers = [_make_buffer(size, device) for _ in range(_BUFFERS)]
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
        self._thread.start()

    def bring(self, unit: Unit) -> None:
        """Puts a unit's weights into the model, and takes those of the one before out.

        Args:
            unit: The next one of the order.

        Raises:
            ValueError: If its file cannot be read or has changed.
        """
        self.release()
        layout = self._layouts[self._next % len(self._layouts)]
        assert layout.unit is unit, f"{unit.name} out of turn, {layout.unit.name} is next"
        start = time.perf_counter()
        self._ready.acquire()
        self.wait_seconds += time.perf_counter() - start
        if self._error is not None:
            raise self._error
        buffer = self._buffers[self._next % _BUFFERS]
        buffer.before_use()
        for slot, offset in zip(unit.slots, layout.offsets, strict=True):
            part = buffer.weights[offset : offset + slot.nbytes]
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
        target = buffer.before_read()
        for piece in layout.pieces:
            part = target[piece.offset : piece.offset + piece.nbytes]
            self._files.read_into(piece.file, piece.start, part)
            self.bytes_read += piece.nbytes
            if not self._keep_pages:
                self._files.drop_pages(piece.file, piece.start, piece.nbytes)
        buffer.after_read(layout.buffer_bytes)


class HostBuffer:
    """A buffer that the model computes from directly.

    Args:
        size: In bytes.
    """

    def __init__(self, size: int) -> None:
        self.weights = torch.empty(size, dtype=torch.uint8)
        self._view = bytes_of(self.weights)

    def before_read(self) -> memoryview:
        """Gives the bytes to read into."""
        return self._view

    def after_read(self, size: int) -> None:
        """Nothing is left to do."""

    def before_use(self) -> None:
        """Nothing is left to do."""

    def after_use(self) -> None:
        """Nothing is left to do."""


class DeviceBuffer:
    """A buffer on an accelerator with a pinned one in front of it and a copy stream between.

    Only the reading thread waits for the device, and only for its own copies.

    Args:
        size: In bytes.
        device: Which.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.weights = torch.empty(size, dtype=torch.uint8, device=device)
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._view = bytes_of(self._staging)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()
        self._used = torch.cuda.Event()

    def before_read(self) -> memoryview:
        """Waits until the last copy has left the pinned buffer, and gives its bytes."""
        self._copied.synchronize()
        return self._view

    def after_read(self, size: int) -> None:
        """Starts the copy of what was read."""
        self.copy(self._staging[:size])

    def copy(self, source: torch.Tensor) -> None:
        """Starts a copy, behind what still computes with the buffer.

        Args:
            source: uint8, pinned.
        """
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            self.weights[: len(source)].copy_(source, non_blocking=True)
            self._copied.record(self._stream)

    def before_use(self) -> None:
        """Makes the computing stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def after_use(self) -> None:
        """Marks the place in the computing stream after which the buffer is free."""
        self._used.record(torch.cuda.current_stream(self._device))


def _make_buffer(size: int, device: torch.device) -> Any:
    return HostBuffer(size) if device.type == "cpu" else DeviceBuffer(size, device)
