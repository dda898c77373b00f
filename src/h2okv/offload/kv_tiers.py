"""Caches on the device, in main memory or in a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from h2okv.cache import H2OCache
from h2okv.cache.slots import SlotLayer
from h2okv.offload.checkpoint import bytes_of


class SlotFile:
    """Regions of a file, taken and given back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            # Open as long as this object is.
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"no file for the cache can be made in '{folder}' ({error.strerror}); give another"
                " --cache-folder"
            ) from error
        self._end = 0
        self._free: list[tuple[int, int]] = []
        self.bytes_read = 0
        self.bytes_written = 0

    def take(self, size: int) -> int:
        """Takes a region."""
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[index] = (start + size, room - size)
                return start
        start, self._end = self._end, self._end + size
        return start

    def give_back(self, start: int, size: int) -> None:
        """Gives a region back."""
        regions = sorted([*(own for own in self._free if own[1]), (start, size)])
        merged: list[tuple[int, int]] = []
        for begin, room in regions:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((begin, room))
        self._free = merged

    def read(self, start: int, target: memoryview) -> None:
        """Reads into memory."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._file.fileno(), [target[done:]], start + done)
            except OSError as error:
                raise ValueError(f"the cache's file cannot be read ({error.strerror})") from error
            if count == 0:
                raise ValueError("the cache's file is shorter than what was written to it")
            done += count
        self.bytes_read += done

    def write(self, start: int, source: memoryview) -> None:
        """Writes from memory."""
        done = 0
        try:
            while done < len(source):
                done += os.pwrite(self._file.fileno(), source[done:], start + done)
        except OSError as error:
            raise ValueError(
                f"the cache's file in '{self._folder}' cannot grow ({error.strerror}); what was"
                " finished is kept, so give another --cache-folder or a smaller --batch and run"
                " the command again"
            ) from error
        self.bytes_written += done

    def close(self) -> None:
        """Lets the file go."""
        self._file.close()


CACHE_PLACES = ("device", "cpu", "file")
_WORKSPACES = 2
_ALIGNMENT = 64


@dataclass
class _Held:
    """A layer's entries in their tier."""

    shapes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]
    tensors: dict[str, torch.Tensor]
    starts: dict[str, int]
    free: torch.Tensor
    seen: int

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.shapes[name].numel() * self.dtypes[name].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they lie in a workspace."""
        return sum(_aligned(self.size(name)) for name in self.shapes)


class TieredStore:
    """A `CacheStore` with a tier for each layer."""

    def __init__(self, places: list[str], folder: Path, device: torch.device) -> None:
        self._places = places
        self._device = device
        self._file = SlotFile(folder) if "file" in places else None
        self._held: dict[tuple[int, int], _Held] = {}
        self._workspaces: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * _WORKSPACES
        self._turn = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="slots")
        self._expected: tuple[tuple[int, int], int, Future[None]] | None = None

    @property
    def bytes_read(self) -> int:
        """Entries read from the file."""
        return self._file.bytes_read if self._file is not None else 0

    @property
    def bytes_written(self) -> int:
        """Entries written to the file."""
        return self._file.bytes_written if self._file is not None else 0

    def bring(self, cache: H2OCache, layer_idx: int) -> None:
        """See `CacheStore.bring`."""
        key = (id(cache), layer_idx)
        held = self._held.get(key)
        if held is None:
            return
        if self._expected is not None and self._expected[0] == key:
            _, turn, reading = self._expected
            self._expected = None
            reading.result()
        else:
            self._finish_reading()
            turn = self._next_workspace(held)
            self._fill(held, turn)
        layer: Any = cache.layers[layer_idx]
        parts = self._parts(held, turn)
        layer.state.set_tensors({name: part.to(self._device) for name, part in parts})

    def expect(self, cache: H2OCache, layer_idx: int) -> None:
        """See `CacheStore.expect`."""
        key = (id(cache), layer_idx)
        held = self._held.get(key)
        if held is None or self._expected is not None:
            return
        turn = self._next_workspace(held)
        self._expected = (key, turn, self._reader.submit(self._fill, held, turn))

    def put_back(self, cache: H2OCache, layer_idx: int, is_new: bool = False) -> None:
        """See `CacheStore.put_back`."""
        key = (id(cache), layer_idx)
        layer: Any = cache.layers[layer_idx]
        place = self._places[layer_idx]
        if place == "device" or not isinstance(layer, SlotLayer) or not layer.holds_entries:
            return
        tensors = layer.state.entry_tensors()
        held = self._held.get(key)
        seen = int(layer.cumulative_length)
        same = held is not None and held.shapes == {n: t.shape for n, t in tensors.items()}
        if held is not None and same and not is_new and seen == held.seen + 1:
            self._write_step(held, tensors)
        else:
            if held is not None:
                self._give_back(held)
            held = self._held[key] = self._write_all(place, tensors)
        held.free, held.seen = layer.state.free_slot.cpu().clone(), seen
        layer.state.set_tensors({name: part.new_empty(0) for name, part in tensors.items()})

    def forget(self, cache: H2OCache) -> None:
        """See `CacheStore.forget`."""
        self._finish_reading()
        for key in [key for key in self._held if key[0] == id(cache)]:
            self._give_back(self._held.pop(key))

    def close(self) -> None:
        """See `CacheStore.close`."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def _write_all(self, place: str, tensors: dict[str, torch.Tensor]) -> _Held:
        held = _Held(
            shapes={name: tensor.shape for name, tensor in tensors.items()},
            dtypes={name: tensor.dtype for name, tensor in tensors.items()},
            tensors={},
            starts={},
            free=torch.empty(0),
            seen=0,
        )
        for name, tensor in tensors.items():
            host = tensor.detach().cpu().contiguous()
            if place == "cpu":
                # Not the workspace itself, which the next layer needs.
                held.tensors[name] = host.clone()
            else:
                assert self._file is not None
                held.starts[name] = self._file.take(held.size(name))
                self._file.write(held.starts[name], bytes_of(host))
        return held

    def _write_step(self, held: _Held, tensors: dict[str, torch.Tensor]) -> None:
        """Writes the one slot of each row and head that a step has filled."""
        for name, tensor in tensors.items():
            batch, heads, slots = tensor.shape[:3]
            first = torch.arange(batch * heads) * slots
            rows = first + held.free.flatten()
            entries = tensor.reshape(batch * heads * slots, -1)[rows.to(tensor.device)].cpu()
            if name in held.tensors:
                held.tensors[name].view(batch * heads * slots, -1)[rows] = entries
                continue
            assert self._file is not None
            source, start = bytes_of(entries.contiguous()), held.starts[name]
            size = len(source) // len(rows)
            for index, row in enumerate(rows.tolist()):
                self._file.write(start + row * size, source[index * size : (index + 1) * size])

    def _fill(self, held: _Held, turn: int) -> None:
        """Copies a layer's entries into a workspace; in the reading thread or in the main one."""
        for name, part in self._parts(held, turn):
            if name in held.tensors:
                part.copy_(held.tensors[name])
            else:
                assert self._file is not None
                self._file.read(held.starts[name], bytes_of(part))

    def _parts(self, held: _Held, turn: int) -> Iterator[tuple[str, torch.Tensor]]:
        """A workspace as a layer's tensors."""
        start = 0
        for name, shape in held.shapes.items():
            part = self._workspaces[turn][start : start + held.size(name)]
            yield name, part.view(held.dtypes[name]).view(shape)
            start += _aligned(held.size(name))

    def _next_workspace(self, held: _Held) -> int:
        """The workspace that was not used last, large enough."""
        self._turn = (self._turn + 1) % _WORKSPACES
        if len(self._workspaces[self._turn]) < held.nbytes:
            # The smaller one is let go first.
            self._workspaces[self._turn] = torch.empty(0, dtype=torch.uint8)
            with torch.inference_mode(False):
                self._workspaces[self._turn] = torch.empty(
                    held.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
                )
        return self._turn

    def _finish_reading(self) -> None:
        """Waits for what was read ahead and is not wanted any more."""
        if self._expected is not None:
            with contextlib.suppress(ValueError):
                self._expected[2].result()
            self._expected = None

    def _give_back(self, held: _Held) -> None:
        for name, start in held.starts.items():
            assert self._file is not None
            self._file.give_back(start, held.size(name))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class CacheStore(Protocol):
    """Keeps layers of caches somewhere else than the memory that the model computes in."""

    def bring(self, cache: H2OCache, layer_idx: int) -> None:
        """Makes a layer's entries ready; mutates the cache."""
        ...

    def expect(self, cache: H2OCache, layer_idx: int) -> None:
        """Says which layer is brought next, so that it can be read meanwhile."""
        ...

    def put_back(self, cache: H2OCache, layer_idx: int, is_new: bool = False) -> None:
        """Takes a layer's entries away again; mutates the cache."""
        ...

    def forget(self, cache: H2OCache) -> None:
        """Gives back what is held for a cache."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...
