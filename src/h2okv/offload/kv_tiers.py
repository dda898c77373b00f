"""KV caches on the device, in main memory or in a file, and caches merged into one batch."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h2okv.cache import H2OCache
from h2okv.cache.slot_state import ordinary_tensors
from h2okv.cache.slots import SlotLayer
from h2okv.offload.checkpoint import Part, block_bytes, parts_of

CACHE_TIERS = ("device", "cpu", "file")


@dataclass
class _StoredLayer:
    """A layer's entries in their tier, one after the other in a block of bytes."""

    names: list[str]
    parts: list[Part]
    block: torch.Tensor
    pages: mmap.mmap | None  # under the block, in the file
    num_tokens: int = 0
    free_slot: Any = None

    def tensors(self) -> Iterable[torch.Tensor]:
        """Views of the entries."""
        return parts_of(self.block, self.parts)

    def advise(self, advice: int) -> None:
        """Tells the system about the pages: that they are needed soon, or no longer."""
        if self.pages is not None:
            self.pages.madvise(advice)


class CacheStore:
    """Keeps the entries of each layer in its tier while other layers compute.

    In the file tier each layer has a file of its own, without a name, mapped into memory: it is
    gone with its layer, or with the process.
    """

    def __init__(self, tiers: Sequence[str], folder: Path, device: torch.device) -> None:
        self._tiers = tiers
        self._folder = folder
        self._device = device
        self._stored: dict[tuple[int, int], _StoredLayer] = {}
        self.bytes_read = 0  # from files
        self.bytes_written = 0

    def load(self, cache: H2OCache, layer_idx: int) -> None:
        """Brings a layer's entries to the device; mutates the cache."""
        stored = self._stored.get((id(cache), layer_idx))
        if stored is None:
            return
        with ordinary_tensors():
            tensors = [tensor.to(self._device, copy=True) for tensor in stored.tensors()]
        layer: Any = cache.layers[layer_idx]
        layer.state.set_tensors(dict(zip(stored.names, tensors, strict=True)))
        if stored.pages is not None:
            self.bytes_read += sum(tensor.nbytes for tensor in tensors)
        stored.advise(mmap.MADV_DONTNEED)

    def prefetch(self, cache: H2OCache, layer_idx: int) -> None:
        """Has the system read the layer that is loaded next, if there is one."""
        if stored := self._stored.get((id(cache), layer_idx)):
            stored.advise(mmap.MADV_WILLNEED)

    def save(self, cache: H2OCache, layer_idx: int, is_new: bool = False) -> None:
        """Takes a layer's entries off the device; mutates the cache.

        After a decode step only the slots that it has filled are written.
        """
        key = (id(cache), layer_idx)
        layer: Any = cache.layers[layer_idx]
        if self._tiers[layer_idx] == "device" or not isinstance(layer, SlotLayer):
            return
        if not layer.holds_entries:
            return
        entries = layer.state.entry_tensors()
        parts = [(tensor.shape, tensor.dtype) for tensor in entries.values()]
        num_tokens = int(layer.cumulative_length)
        stored = self._stored.pop(key, None)
        same = stored is not None and stored.parts == parts and not is_new
        if stored is not None and same and num_tokens == stored.num_tokens + 1:
            written = self._write_step(stored, entries.values())
        else:
            del stored  # its room is free before more is taken
            stored = _StoredLayer(list(entries), parts, *self._make_block(layer_idx, parts))
            written = 0
            for target, tensor in zip(stored.tensors(), entries.values(), strict=True):
                written += target.copy_(tensor).nbytes
        if stored.pages is not None:
            self.bytes_written += written
        stored.advise(mmap.MADV_DONTNEED)
        stored.num_tokens = num_tokens
        stored.free_slot = layer.state.free_slot.cpu().clone()
        self._stored[key] = stored
        layer.state.set_tensors({name: own.new_empty(0) for name, own in entries.items()})

    def drop(self, cache: H2OCache) -> None:
        """Frees what is stored for a cache."""
        for key in [key for key in self._stored if key[0] == id(cache)]:
            del self._stored[key]

    def close(self) -> None:
        """Frees everything."""
        self._stored.clear()

    @ordinary_tensors()
    def _make_block(
        self, layer_idx: int, parts: list[Part]
    ) -> tuple[torch.Tensor, mmap.mmap | None]:
        size = block_bytes(parts)
        if self._tiers[layer_idx] == "cpu":
            is_pinned = self._device.type == "cuda"
            return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned), None
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Room is taken now, when a full disk is an error and not yet a signal.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:  # macOS
                    os.ftruncate(file.fileno(), size)
                pages = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ValueError(
                f"the cache's file in '{self._folder}' cannot be made or grow ({error.strerror});"
                " what was finished is kept, so give another --cache-folder or a smaller --batch"
                " and run the command again"
            ) from error
        return torch.frombuffer(pages, dtype=torch.uint8), pages

    def _write_step(self, stored: _StoredLayer, entries: Iterable[torch.Tensor]) -> int:
        """Writes the one slot of each sequence and head that a step has filled."""
        written = 0
        for target, tensor in zip(stored.tensors(), entries, strict=True):
            batch, heads, slots = tensor.shape[:3]
            places = torch.arange(batch * heads) * slots + stored.free_slot.flatten()
            filled = tensor.reshape(batch * heads * slots, -1)[places.to(tensor.device)].cpu()
            target.view(batch * heads * slots, -1)[places] = filled
            written += filled.nbytes
        return written


def can_merge(cache: H2OCache) -> bool:
    """Whether a cache's sequences can be put beside another's."""
    return all(isinstance(layer, SlotLayer) for layer in cache.layers)


def merge_caches(first: H2OCache, second: H2OCache, store: CacheStore | None = None) -> H2OCache:
    """Appends a cache's sequences to another's, layer by layer; empties the second."""
    layers: Any = zip(first.layers, second.layers, strict=True)
    for index, (upper, lower) in enumerate(layers):
        if store is not None:
            store.load(first, index)
            store.load(second, index)
        upper.join(lower)
        if store is not None:
            store.save(first, index, is_new=True)
    return first
