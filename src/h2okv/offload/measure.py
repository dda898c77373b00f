"""Budgets by head of a model larger than memory, measured while its weights are streamed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from h2okv.cache.argument import cache_in
from h2okv.calibration.factors import FOLLOWING, FRACTIONS, WINDOW
from h2okv.calibration.layer_budgets import Weights
from h2okv.offload.checkpoint import CheckpointFiles, StoredTensor, bytes_of, named_keys, read_group
from h2okv.offload.meta_model import MetaModel, ParameterSlot, Unit
from h2okv.provenance import chunks_of, weight_print


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
    in memory. The embedding stays there.
    """

    def __init__(self, meta: MetaModel, files: CheckpointFiles, device: torch.device) -> None:
        self.model: PreTrainedModel = meta.model
        self._meta, self._files, self._device = meta, files, device
        self._named = named_keys(meta, files)
        self._install([meta.embedding, *meta.others])
        for name, buffer in [*meta.model.named_buffers(remove_duplicate=False)]:
            owner, _, attribute = name.rpartition(".")
            location = meta.model.get_submodule(owner)
            if any(stored == name for stored, _ in self._named.values()):
                slot = ParameterSlot(name, location, attribute, buffer.shape, buffer.dtype)
                (buffer,) = read_group(meta, files, self._named, [slot])
            location._buffers[attribute] = buffer.to(device)
        self._cache: Any = None  # of the current forward
        hook: Any = lambda _, args, kwargs: setattr(self, "_cache", cache_in(kwargs))  # noqa: E731
        meta.model.register_forward_pre_hook(hook, with_kwargs=True)
        for index, unit in enumerate(meta.units):
            unit.module.forward = partial(self._forward, index, unit, unit.module.forward)

    def weights(self) -> Weights:
        """Return what tells the weights from others; reads all if some are converted."""
        meta, begun = self._meta, time.perf_counter()
        self._install(meta.units[0].slots)
        seconds = time.perf_counter() - begun
        size = sum(unit.nbytes for unit in meta.units)
        weights = weights_in_files(meta, self._files)
        prints = dict(weights.prints)
        for unit in meta.units:
            missing = [slot for slot in unit.slots if slot.name not in prints]
            if missing:
                self._install(unit.slots)
                for slot in missing:
                    flat = slot.owner.get_parameter(slot.attribute).detach().reshape(-1)
                    chunks = [flat[chunk].cpu() for chunk in chunks_of(len(flat))]
                    prints[slot.name] = weight_print(slot.shape, torch.cat(chunks))
            _empty(unit)
        pass_seconds = seconds * size / max(1, meta.units[0].nbytes)
        return replace(weights, prints=prints, is_complete=True, pass_seconds=pass_seconds)

    def _install(self, slots: Any) -> None:
        """Read parameters to the device; a tied head shares the embedding's."""
        table = self._meta.embedding
        group = [slot for slot in slots if slot is table or slot.name != table.name]
        tensors = list(read_group(self._meta, self._files, self._named, group))
        for slot, tensor in zip(group, tensors, strict=True):
            slot.fill(tensor.to(self._device))
        for slot in slots:
            if slot not in group:
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
            self._install(unit.slots)
            try:
                return forward(*args, **kwargs)
            finally:
                _empty(unit)

        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _empty(unit: Unit) -> None:
    for slot in unit.slots:
        slot.empty()


def _copies(layer: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Copy fields; those of `DynamicLayer` are replaced and not written to."""
    if isinstance(layer, DynamicLayer):
        return dict(fields)
    return {n: v.clone() if torch.is_tensor(v) else v for n, v in fields.items()}
