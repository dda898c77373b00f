"""Gives a meta model its weights: resident, or streamed one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from h2okv.offload.batch_runner import MicroBatch
from h2okv.offload.checkpoint import CheckpointFiles, StoredTensor, bytes_of
from h2okv.offload.conversion import UnitLayout, lay_out
from h2okv.offload.kv_tiers import CacheStore
from h2okv.offload.meta_model import MetaModel, ParameterSlot, Unit
from h2okv.offload.planner import Placement
from h2okv.offload.weight_stream import WeightStream


class EmbeddingReader:
    """Reads only the embedding rows of the tokens at hand.

    The module's own forward runs on them, so that families that scale their embeddings still do.
    """

    def __init__(
        self,
        slot: ParameterSlot,
        stored: StoredTensor,
        files: CheckpointFiles,
        device: torch.device,
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
        self._clear()
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(lambda *_: self._clear())

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, indices = torch.unique(args[0], return_inverse=True)
        rows = torch.empty((len(tokens), *self._slot.shape[1:]), dtype=self._slot.dtype)
        target, size = bytes_of(rows), self._row_bytes
        for index, token in enumerate(tokens.tolist()):
            part = target[index * size : (index + 1) * size]
            self._files.read_into(self._stored.file, self._stored.start + token * size, part)
        self.bytes_read += len(tokens) * size
        self._slot.fill(rows.to(self._device))
        return (indices, *args[1:])

    def _clear(self) -> None:
        """Leaves no rows; on the device, for some models ask where the embedding is."""
        shape = (0, *self._slot.shape[1:])
        self._slot.fill(torch.empty(shape, dtype=self._slot.dtype, device=self._device))


class LayerwiseScheduler:
    """A `ForwardScheduler` that runs all micro-batches through each layer before the next.

    FlexGen's zig-zag block schedule (arXiv 2303.06865, section 4.1): each weight pass serves every
    micro-batch. Transformers' own forwards are suspended before each unit, in greenlets.
    """

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
        self._greenlet = _import_greenlet()
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._suspend_before(index), with_kwargs=True)

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `ForwardScheduler.run`."""
        forwards = [_Forward(batch, self._greenlet, model) for batch in batches]
        try:
            for forward in forwards:
                forward.resume()
            while any(forward.unit is not None for forward in forwards):
                index = min(forward.unit for forward in forwards if forward.unit is not None)
                if index in self._streamed:
                    assert self._stream is not None
                    self._stream.load(self._units[index])
                self._run_unit(index, [forward for forward in forwards if forward.unit == index])
            if self._stream is not None:
                self._stream.release()
        finally:
            for forward in forwards:
                forward.abort()
        for forward in forwards:
            yield forward.batch, forward.logits

    def drop(self, batch: MicroBatch) -> None:
        """See `ForwardScheduler.drop`."""
        if self.store is not None:
            self.store.drop(batch.cache)

    def close(self) -> None:
        """Ends reading."""
        if self._stream is not None:
            self._stream.close()
        if self.store is not None:
            self.store.close()

    def _run_unit(self, index: int, forwards: list[_Forward]) -> None:
        layer = self._units[index].layer_idx
        if self.store is None or layer is None:
            for forward in forwards:
                forward.resume()
            return
        following = [(forward, layer) for forward in forwards[1:]] + [(forwards[0], layer + 1)]
        for forward, (other, later) in zip(forwards, following, strict=True):
            self.store.load(forward.batch.cache, layer)
            if later < len(forward.batch.cache.layers):
                self.store.prefetch(other.batch.cache, later)
            forward.resume()
            self.store.save(forward.batch.cache, layer)

    def _suspend_before(self, index: int) -> Callable[..., Any]:
        def suspend(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            current = self._greenlet.getcurrent()
            if current.parent is not None:
                current.parent.switch(index)
            # With strided input a bf16 product on a CPU copies the weights once for each sequence.
            return tuple(a.contiguous() if torch.is_tensor(a) else a for a in args), kwargs

        return suspend


class _Forward:
    """A micro-batch's forward, suspended before a unit, or finished (``unit`` is ``None``)."""

    def __init__(self, batch: MicroBatch, greenlet: Any, model: PreTrainedModel) -> None:
        self.batch = batch
        self.unit: int | None = None
        self._greenlet = greenlet.greenlet(lambda: batch.forward(model))

    def resume(self) -> None:
        """Runs up to the next unit, or to the end."""
        result = self._greenlet.switch()
        if self._greenlet.dead:
            self.unit, self.logits = None, result
        else:
            self.unit = result

    def abort(self) -> None:
        """Unwinds a forward that did not come to its end."""
        if not self._greenlet.dead:
            self._greenlet.throw()


def _import_greenlet() -> Any:
    try:
        import greenlet
    except ImportError as error:
        raise ValueError(
            "weights and caches outside the memory need greenlet; install it with pip install"
            " 'h2okv[offload]'"
        ) from error
    return greenlet


@dataclass(frozen=True)
class OffloadedModel:
    """A model with its weights in place.

    Attributes:
        meta: The model and its parts.
        scheduler: Runs its forwards.
        stream: Streams weights; ``None`` if all are resident.
        embedding: Reads embedding rows; ``None`` if the embedding is resident.
        resident_bytes: Weights that were loaded to stay.
    """

    meta: MetaModel
    scheduler: LayerwiseScheduler
    stream: WeightStream | None
    embedding: EmbeddingReader | None
    resident_bytes: int

    @property
    def bytes_read(self) -> int:
        """Weights read from the disk since the model was materialised."""
        parts = (self.stream, self.embedding)
        return sum(part.bytes_read for part in parts if part is not None)

    def close(self) -> None:
        """Ends reading."""
        self.scheduler.close()


def materialise(
    meta: MetaModel,
    files: CheckpointFiles,
    found: dict[str, StoredTensor],
    placement: Placement,
    device: torch.device,
    store: CacheStore | None = None,
    keep_pages: bool = False,
) -> OffloadedModel:
    """Loads the resident weights, and starts the stream of the others."""
    _load_buffers(meta, files, found, device)
    loader = _Loader(files, found, device)
    for slot in meta.others:
        slot.fill(loader.tensor(slot))
    layouts = [lay_out(unit, found) for unit in meta.units]
    on_host = set(placement.indices("cpu")) if device.type != "cpu" else set()
    streamed = sorted({*placement.indices("disk"), *on_host})
    in_host_memory: dict[str, torch.Tensor] = {}
    for index, (unit, layout) in enumerate(zip(meta.units, layouts, strict=True)):
        if index in on_host:
            in_host_memory[unit.name] = loader.block(layout, pinned=True)
        elif index not in streamed:
            layout.fill(loader.block(layout).to(device))
    embedding = _place_embedding(meta, placement, loader)
    stream = None
    if streamed:
        order = [layouts[index] for index in streamed]
        stream = WeightStream(order, files, device, keep_pages, in_host_memory)
    scheduler = LayerwiseScheduler(meta.units, streamed, stream, store)
    return OffloadedModel(meta, scheduler, stream, embedding, loader.num_bytes)


class _Loader:
    """Reads parameters that stay."""

    def __init__(
        self, files: CheckpointFiles, found: dict[str, StoredTensor], device: torch.device
    ) -> None:
        self.files = files
        self.found = found
        self.device = device
        self.num_bytes = 0

    def tensor(self, slot: ParameterSlot) -> torch.Tensor:
        """A parameter, on the device."""
        self.num_bytes += slot.nbytes
        return self.files.read(self.found[slot.name]).to(self.device)

    def block(self, layout: UnitLayout, pinned: bool = False) -> torch.Tensor:
        """A unit as it would lie in a buffer, uint8 on the CPU."""
        host = torch.empty(layout.buffer_bytes, dtype=torch.uint8, pin_memory=pinned)
        target = bytes_of(host)
        for own in layout.extents:
            self.files.read_into(own.file, own.start, target[own.offset : own.offset + own.nbytes])
            self.files.drop_pages(own.file, own.start, own.nbytes)
        self.num_bytes += layout.buffer_bytes
        return host


def _place_embedding(
    meta: MetaModel, placement: Placement, loader: _Loader
) -> EmbeddingReader | None:
    slot, head = meta.embedding, meta.units[-1]
    if meta.is_tied and placement.units[-1] == "device":
        (own,) = [s for s in head.slots if s.name == slot.name]
        shared: Any = own.owner._parameters[own.attribute]
        slot.fill(shared.data)
        return None
    if placement.embedding != "disk":
        slot.fill(loader.tensor(slot))
        return None
    return EmbeddingReader(slot, loader.found[slot.name], loader.files, loader.device)


def _load_buffers(
    meta: MetaModel,
    files: CheckpointFiles,
    found: dict[str, StoredTensor],
    device: torch.device,
) -> None:
    """Reads the buffers that the checkpoint holds; others are as the model made them."""
    for name, buffer in meta.model.named_buffers():
        if name in found:
            buffer.copy_(files.read(found[name]))
    for module in meta.model.modules():
        for name, held in module._buffers.items():
            if held is not None:
                module._buffers[name] = held.to(device)
