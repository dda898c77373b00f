"""KV caches on the device, in main memory or in a file, and caches merged into one batch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from h2okv.cache import H2OCache
from h2okv.cache.slots import SlotLayer
from h2okv.offload.checkpoint import bytes_of

CACHE_TIERS = ("device", "cpu", "file")
_WORKSPACES = 2
_ALIGNMENT = 64


class CacheStore(Protocol):
    """Keeps the entries of caches somewhere else than in the memory of the device."""

    def load(self, cache: H2OCache, layer_idx: int) -> None:
        """Brings a layer's entries to the device; mutates the cache."""

    def prefetch(self, cache: H2OCache, layer_idx: int) -> None:
        """Starts reading the layer that is loaded next."""

    def save(self, cache: H2OCache, layer_idx: int, is_new: bool = False) -> None:
        """Takes a layer's entries off the device; mutates the cache."""

    def drop(self, cache: H2OCache) -> None:
        """Frees what is stored for a cache."""

    def close(self) -> None:
        """Frees everything."""


class SpillFile:
    """Regions of an unnamed temporary file, allocated and freed."""

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

    def allocate(self, size: int) -> int:
        """Allocates a region; returns its start."""
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                self._free[index] = (start + size, free - size)
                return start
        start, self._end = self._end, self._end + size
        return start

    def free(self, start: int, size: int) -> None:
        """Frees a region."""
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*(own for own in self._free if own[1]), (start, size)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
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
        """Deletes the file."""
        self._file.close()


@dataclass
class _StoredLayer:
    """A layer's entries in their tier: in ``tensors``, or in the file from ``starts`` on."""

    shapes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    free_slot: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    num_tokens: int = 0

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.shapes[name].numel() * self.dtypes[name].itemsize

    def views(self, workspace: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A uint8 workspace as the layer's tensors."""
        start = 0
        for name, shape in self.shapes.items():
            yield (
                name,
                workspace[start : start + self.size(name)].view(self.dtypes[name]).view(shape),
            )
            start += _aligned(self.size(name))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in a workspace."""
        return sum(_aligned(self.size(name)) for name in self.shapes)


class TieredCacheStore:
    """A `CacheStore` with a tier for each layer, and two workspaces that layers are read into."""

    def __init__(self, tiers: list[str], folder: Path, device: torch.device) -> None:
        self._tiers = tiers
        self._device = device
        self._file = SpillFile(folder) if "file" in tiers else None
        self._stored: dict[tuple[int, int], _StoredLayer] = {}
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

    def load(self, cache: H2OCache, layer_idx: int) -> None:
        """See `CacheStore.load`."""
        key = (id(cache), layer_idx)
        stored = self._stored.get(key)
        if stored is None:
            return
        if self._expected is not None and self._expected[0] == key:
            _, turn, reading = self._expected
            self._expected = None
            reading.result()
        else:
            self._cancel_prefetch()
            turn = self._next_workspace(stored)
            self._fill(stored, turn)
        parts = stored.views(self._workspaces[turn])
        layer: Any = cache.layers[layer_idx]
        layer.state.set_tensors({name: part.to(self._device) for name, part in parts})

    def prefetch(self, cache: H2OCache, layer_idx: int) -> None:
        """See `CacheStore.prefetch`."""
        key = (id(cache), layer_idx)
        stored = self._stored.get(key)
        if stored is not None and self._expected is None:
            turn = self._next_workspace(stored)
            self._expected = (key, turn, self._reader.submit(self._fill, stored, turn))

    def save(self, cache: H2OCache, layer_idx: int, is_new: bool = False) -> None:
        """See `CacheStore.save`; after a decode step only the changed slots are written."""
        key = (id(cache), layer_idx)
        layer: Any = cache.layers[layer_idx]
        tier = self._tiers[layer_idx]
        if tier == "device" or not isinstance(layer, SlotLayer) or not layer.holds_entries:
            return
        tensors = layer.state.entry_tensors()
        stored = self._stored.get(key)
        num_tokens = int(layer.cumulative_length)
        same = stored is not None and stored.shapes == {n: t.shape for n, t in tensors.items()}
        if stored is not None and same and not is_new and num_tokens == stored.num_tokens + 1:
            self._write_step(stored, tensors)
        else:
            if stored is not None:
                self._free(stored)
            stored = self._stored[key] = self._write_all(tier, tensors)
        stored.num_tokens = num_tokens
        stored.free_slot = layer.state.free_slot.cpu().clone()
        layer.state.set_tensors({name: own.new_empty(0) for name, own in tensors.items()})

    def drop(self, cache: H2OCache) -> None:
        """See `CacheStore.drop`."""
        self._cancel_prefetch()
        for key in [key for key in self._stored if key[0] == id(cache)]:
            self._free(self._stored.pop(key))

    def close(self) -> None:
        """See `CacheStore.close`."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def _write_all(self, tier: str, tensors: dict[str, torch.Tensor]) -> _StoredLayer:
        stored = _StoredLayer(
            shapes={name: tensor.shape for name, tensor in tensors.items()},
            dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        )
        for name, tensor in tensors.items():
            host = tensor.detach().cpu().contiguous()
            if tier == "cpu":
                # Not the workspace itself, which the next layer needs.
                stored.tensors[name] = host.clone()
            else:
                assert self._file is not None
                stored.starts[name] = self._file.allocate(stored.size(name))
                self._file.write(stored.starts[name], bytes_of(host))
        return stored

    def _write_step(self, stored: _StoredLayer, tensors: dict[str, torch.Tensor]) -> None:
        """Writes the one slot of each sequence and head that a step has filled."""
        for name, tensor in tensors.items():
            batch, heads, slots = tensor.shape[:3]
            places = torch.arange(batch * heads) * slots + stored.free_slot.flatten()
            flat = tensor.reshape(batch * heads * slots, -1)
            entries = flat[places.to(tensor.device)].cpu().contiguous()
            if name in stored.tensors:
                stored.tensors[name].view(batch * heads * slots, -1)[places] = entries
                continue
            assert self._file is not None
            source, start = bytes_of(entries), stored.starts[name]
            size = len(source) // len(places)
            for index, place in enumerate(places.tolist()):
                self._file.write(start + place * size, source[index * size : (index + 1) * size])

    def _fill(self, stored: _StoredLayer, turn: int) -> None:
        """Copies a layer's entries into a workspace; in the reader thread or the main thread."""
        for name, part in stored.views(self._workspaces[turn]):
            if name in stored.tensors:
                part.copy_(stored.tensors[name])
            else:
                assert self._file is not None
                self._file.read(stored.starts[name], bytes_of(part))

    def _next_workspace(self, stored: _StoredLayer) -> int:
        """The workspace that was not used last, large enough."""
        self._turn = (self._turn + 1) % _WORKSPACES
        if len(self._workspaces[self._turn]) < stored.nbytes:
            # The smaller one is freed first.
            self._workspaces[self._turn] = torch.empty(0, dtype=torch.uint8)
            with torch.inference_mode(False):
                self._workspaces[self._turn] = torch.empty(
                    stored.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
                )
        return self._turn

    def _cancel_prefetch(self) -> None:
        if self._expected is not None:
            with contextlib.suppress(ValueError):
                self._expected[2].result()
            self._expected = None

    def _free(self, stored: _StoredLayer) -> None:
        for name, start in stored.starts.items():
            assert self._file is not None
            self._file.free(start, stored.size(name))


def can_merge(cache: H2OCache) -> bool:
    """Whether a cache's sequences can be put beside another's."""
    return all(isinstance(layer, SlotLayer) for layer in cache.layers)


def merge_caches(first: H2OCache, second: H2OCache, store: CacheStore | None = None) -> H2OCache:
    """Appends a cache's sequences to another's, layer by layer; empties the second."""
    layers: Any = zip(first.layers, second.layers, strict=True)
    for index, (upper, lower) in enumerate(layers):
        if store is not None:
            store.load(first, index)
            # The workspace that they are in is needed for the other cache.
            entries = upper.state.entry_tensors().items()
            upper.state.set_tensors({name: tensor.clone() for name, tensor in entries})
            store.load(second, index)
        upper.join(lower)
        if store is not None:
            store.save(first, index, is_new=True)
    return first


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
