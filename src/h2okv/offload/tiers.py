"""Weights streamed layer by layer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import add
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from h2okv.cache.argument import cache_in
from h2okv.calibration.factors import FOLLOWING, FRACTIONS, WINDOW
from h2okv.calibration.layer_budgets import Weights
from h2okv.offload.checkpoint import CheckpointFiles, StoredTensor, bytes_of, named_keys
from h2okv.offload.meta_model import (
    MetaModel,
    ParameterSlot,
    Unit,
    block_bytes,
)
from h2okv.provenance import chunks_of, weight_print

_BUFFERS = 2
_STACK_BYTES = 1 << 20  # of a reader thread; the default 8 MiB count as data of the process


class WeightStream:
    """Two buffers and a thread that reads one unit after the other into them, in a cycle.

    The thread is always one unit ahead, also across weight passes. The buffers are the two ends of
    one block. On an accelerator a pinned block is in front of it, and a copy stream between; only
    the thread waits for the device, and only for its own copies. Units whose weights are in the
    CPU's memory are copied from there.
    """

    def __init__(
        self,
        units: list[Unit],
        files: CheckpointFiles,
        device: torch.device,
        in_host_memory: dict[str, torch.Tensor],
    ) -> None:
        self.units = units  # in the order of a forward
        self._files, self._device, self._in_host_memory = files, device, in_host_memory
        self._block = torch.empty(arena_bytes(units), dtype=torch.uint8, device=device)
        self._staging, self._copies = self._block, None
        if device.type != "cpu":
            self._staging = torch.empty(len(self._block), dtype=torch.uint8, pin_memory=True)
            self._copies = torch.cuda.Stream(device)
            self._copied, self._used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._current: Unit | None = None
        self._num_loaded = 0
        self.bytes_read = 0
        self.wait_seconds = 0.0  # that the computation waited for reading
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._reads: deque[Future[None]] = deque()
        default = threading.stack_size(_STACK_BYTES)
        for number in range(_BUFFERS):  # the first one starts the thread
            self._reads.append(self._thread.submit(self._read, number))
        threading.stack_size(default)

    def load(self, unit: Unit) -> None:
        """Install the next unit's weights, and remove those of the previous unit."""
        self.release()
        following = self.units[self._num_loaded % len(self.units)]
        assert following is unit, f"{unit.name} out of order, {following.name} is next"
        start = time.perf_counter()
        self._reads.popleft().result()
        self.wait_seconds += time.perf_counter() - start
        if self._copies is not None:
            copied = self._copied[self._num_loaded % _BUFFERS]
            torch.cuda.current_stream(self._device).wait_event(copied)
        unit.fill(self._buffer(self._block, self._num_loaded))
        self._num_loaded += 1
        self._current = unit

    def release(self) -> None:
        """Return the current unit's buffer to the reader; call it after a weight pass."""
        if self._current is None:
            return
        self._current.empty()
        self._current = None
        number = self._num_loaded - 1
        if self._copies is not None:
            self._used[number % _BUFFERS].record(torch.cuda.current_stream(self._device))
        self._reads.append(self._thread.submit(self._read, number + _BUFFERS))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._current = None

    def _read(self, number: int) -> None:
        """Read the unit of the n-th load, counted from 0; runs in the reader thread."""
        unit, buffer = self.units[number % len(self.units)], number % _BUFFERS
        host = self._in_host_memory.get(unit.name)
        if host is None:
            host = self._buffer(self._staging, number)
            if self._copies is not None:
                self._copied[buffer].synchronize()  # the last copy has left the pinned bytes
            self._files.read_unit_into(unit, host)
            self.bytes_read += unit.nbytes
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(self._used[buffer])
                self._buffer(self._block, number).copy_(host, non_blocking=True)
                self._copied[buffer].record(self._copies)

    def _buffer(self, block: torch.Tensor, number: int) -> torch.Tensor:
        """Return the unit's end of a block; with an odd number of units it alternates."""
        size = block_bytes(self.units[number % len(self.units)].specs)
        return block[len(block) - size :] if number % _BUFFERS else block[:size]


def arena_bytes(units: list[Unit]) -> int:
    """Return the bytes of a block whose two ends are the buffers used and filled in turn."""
    sizes = [block_bytes(unit.specs) for unit in units]
    return max(map(add, sizes, [*sizes[1:], *sizes[:1]]), default=0)


class EmbeddingReader:
    """Reads only the embedding's rows of the current tokens, before each forward of it."""

    def __init__(self, slot: ParameterSlot, files: CheckpointFiles, device: torch.device) -> None:
        self._slot, self._device = slot, device
        self._files, self._stored = files, files.parameters[slot.name]
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
        stored = self._stored
        size = stored.nbytes // stored.shape[0]
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self._files.read_into(stored.file, stored.start + token * size, bytes_of(row))
        self.bytes_read += rows.nbytes
        self._slot.fill(rows.to(self._device))
        return (indices, *args[1:])

    def _clear(self) -> None:
        """Drop all rows; stay on the device, because some models read the embedding's device."""
        shape = (0, *self._slot.shape[1:])
        self._slot.fill(torch.empty(shape, dtype=self._slot.dtype, device=self._device))


def _place_others(meta: MetaModel, files: CheckpointFiles, device: torch.device) -> None:
    """Load buffers, and parameters outside the units but the embedding's."""
    for name, buffer in [*meta.model.named_buffers(remove_duplicate=False)]:
        owner, _, attribute = name.rpartition(".")
        if name in files.parameters:  # the model has computed the others
            buffer.copy_(files.read(files.parameters[name]))
        meta.model.get_submodule(owner)._buffers[attribute] = buffer.to(device)
    for slot in meta.others:
        slot.fill(files.read(files.parameters[slot.name]).to(device))


def materialise(
    meta: MetaModel, files: CheckpointFiles, placement: Sequence[str], device: torch.device
) -> tuple[WeightStream | None, EmbeddingReader | None]:
    """Load resident weights, and stream the others; the last tier is the embedding's."""
    *unit_places, embedding_place = placement
    _place_others(meta, files, device)
    streamed = []
    in_host_memory: dict[str, torch.Tensor] = {}
    for unit, tier in zip(meta.units, unit_places, strict=True):
        if tier == "disk" or (tier == "cpu" and device.type != "cpu"):
            streamed.append(unit)
            if tier == "cpu":
                in_host_memory[unit.name] = files.read_unit(unit, pinned=True)
        else:
            unit.fill(files.read_unit(unit).to(device))
    embedding = None
    if meta.is_tied and unit_places[-1] == "device":
        (head_slot,) = [slot for slot in meta.units[-1].slots if slot.name == meta.embedding.name]
        meta.embedding.fill(head_slot.owner.get_parameter(head_slot.attribute).data)
    elif embedding_place == "disk":
        embedding = EmbeddingReader(meta.embedding, files, device)
    else:
        meta.embedding.fill(files.read(files.parameters[meta.embedding.name]).to(device))
    stream = WeightStream(streamed, files, device, in_host_memory) if streamed else None
    return stream, embedding


def bytes_while_streaming(meta: MetaModel) -> int:
    """Return about the memory that measuring takes besides the process's."""
    text, itemsize = meta.model.config.get_text_config(), meta.embedding.dtype.itemsize
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    resident = meta.embedding.nbytes + sum(slot.nbytes for slot in meta.others)
    largest = max(
        sum(s.nbytes for s in unit.slots if s.name != meta.embedding.name) for unit in meta.units
    )
    # Of a window: keys and values, and how heads attend, in two copies; gates; activations.
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    entries = 2 * (len(meta.units) - 1) * kv_heads * WINDOW
    attention = 6 * heads * FOLLOWING * WINDOW * 4
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = 6 * WINDOW * (text.hidden_size + inner) * 4
    logits = 6 * FOLLOWING * text.vocab_size * 4
    orders = entries * (2 * size * itemsize + len(FRACTIONS) * 8 + FOLLOWING)
    return resident + 2 * largest + orders + max(attention + activations, logits)


def weights_in_files(meta: MetaModel, files: CheckpointFiles) -> Weights:
    """Return what tells a checkpoint's weights from others, without loading them.

    It is not complete if transformers converts some of them when it loads them.
    """
    names = {slot.name: slot.shape for slot in meta.slots}
    prints = {}
    for key, (name, pattern) in named_keys(meta, files).items():
        if pattern is None and name in names:
            stored = files.tensors[key]
            chunks = [_read(files, stored, chunk) for chunk in chunks_of(names[name].numel())]
            prints[name] = weight_print(names[name], torch.cat(chunks))
    return Weights(prints, len(prints) == len(names))


def _read(files: CheckpointFiles, stored: StoredTensor, chunk: slice) -> torch.Tensor:
    """Read some elements of a stored tensor, which is flat in its file."""
    elements = torch.empty(chunk.stop - chunk.start, dtype=stored.dtype)
    start = stored.start + chunk.start * stored.dtype.itemsize
    files.read_into(stored.file, start, bytes_of(elements))
    return elements


class StreamingModel:
    """A model that reads each layer's weights whenever it computes the layer, without a thread.

    For a backward pass a layer is computed again, so that one layer's activations and weights are
    in memory. The embedding stays there. The files have the `parameters` of the model.
    """

    def __init__(self, meta: MetaModel, files: CheckpointFiles, device: torch.device) -> None:
        self.model: PreTrainedModel = meta.model
        self._meta, self._files, self._device = meta, files, device
        _place_others(meta, files, device)
        meta.embedding.fill(files.read(files.parameters[meta.embedding.name]).to(device))
        self._cache: Any = None  # of the current forward
        hook: Any = lambda _, args, kwargs: setattr(self, "_cache", cache_in(kwargs))  # noqa: E731
        meta.model.register_forward_pre_hook(hook, with_kwargs=True)
        for index, unit in enumerate(meta.units):
            unit.module.forward = partial(self._forward, index, unit, unit.module.forward)

    def weights(self) -> Weights:
        """Return what tells the weights from others, and the time of reading them once."""
        unit, begun = self._meta.units[0], time.perf_counter()
        self._install(unit)
        seconds = time.perf_counter() - begun
        unit.empty()
        size = sum(unit.nbytes for unit in self._meta.units)
        weights = weights_in_files(self._meta, self._files)
        return replace(weights, pass_seconds=seconds * size / max(1, unit.nbytes))

    def _install(self, unit: Unit) -> None:
        """Read a unit to the device; a tied head shares the embedding's weights."""
        table = self._meta.embedding
        unshared = replace(unit, slots=tuple(s for s in unit.slots if s.name != table.name))
        unshared.fill(self._files.read_unit(unshared).to(self._device))
        for slot in set(unit.slots) - set(unshared.slots):
            slot.fill(table.owner.get_parameter(table.attribute).data)

    def _forward(self, index: int, unit: Unit, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a layer or the head with weights that are read for it."""
        layers = () if self._cache is None else self._cache.layers
        layer = layers[index] if index < len(layers) else None
        before: dict[str, Any] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            if layer is not None and torch.is_grad_enabled():
                # Computed again, the layer must find the cache as it was.
                if before is None:
                    before = _copies(layer, vars(layer))
                else:
                    vars(layer).update(_copies(layer, before))
            self._install(unit)
            try:
                return forward(*args, **kwargs)
            finally:
                unit.empty()

        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _copies(layer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Copy fields; those of `DynamicLayer` are replaced and not written to."""
    if isinstance(layer, DynamicLayer):
        return dict(fields)
    return {n: v.clone() if torch.is_tensor(v) else v for n, v in fields.items()}
