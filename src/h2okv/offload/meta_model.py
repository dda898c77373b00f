"""A model on the meta device, and its weights in a checkpoint: as they are, or converted."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, str_to_torch_dtype

from h2okv.console import Progress, optional
from h2okv.offload.checkpoint import (
    CheckpointFiles,
    Part,
    StoredTensor,
    bytes_of,
    parts_of,
)
from h2okv.provenance import digest


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter's place in the model: the module that owns it, and its attribute there."""

    name: str
    owner: nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Stored size."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def form(self) -> str:
        """Storage format; a file in another format has to be converted."""
        return f"{type(self).__name__} {self.dtype}"

    @property
    def num_weights(self) -> int:
        """Numbers of the parameter, however they are stored."""
        return self.shape.numel()

    def to_bytes(self, parameter: torch.Tensor) -> torch.Tensor:
        """Converts a loaded parameter to what is stored for it: dtype and shape of the slot."""
        return parameter.to(self.dtype).contiguous()

    def fill(self, tensor: torch.Tensor) -> None:
        """Installs a tensor; mutates the module."""
        self.owner._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=False)

    def empty(self) -> None:
        """Installs a meta tensor, so that using the parameter is an error."""
        self.fill(torch.empty(self.shape, dtype=self.dtype, device="meta"))


@dataclass(frozen=True)
class Unit:
    """Parameters that are loaded together: a decoder layer, or the head (``layer_idx=None``)."""

    name: str
    module: nn.Module
    layer_idx: int | None
    slots: tuple[ParameterSlot, ...]

    @property
    def nbytes(self) -> int:
        """Size of its weights."""
        return sum(slot.nbytes for slot in self.slots)

    @property
    def parts(self) -> list[Part]:
        """Its weights' places in a block of bytes."""
        return [(slot.shape, slot.dtype) for slot in self.slots]

    def fill(self, block: torch.Tensor) -> None:
        """Installs views of a uint8 block; mutates the module."""
        for slot, part in zip(self.slots, parts_of(block, self.parts), strict=True):
            slot.fill(part)


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters take no memory, and its parts in the order of a forward."""

    model: PreTrainedModel
    units: tuple[Unit, ...]  # the decoder layers, then the output head
    embedding: ParameterSlot
    others: tuple[ParameterSlot, ...]  # such as the last norm and learned positions

    @property
    def slots(self) -> list[ParameterSlot]:
        """All parameters; a tied weight is listed in both places."""
        in_units = (slot for unit in self.units for slot in unit.slots)
        return [self.embedding, *self.others, *in_units]

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding share their weights."""
        return any(slot.name == self.embedding.name for slot in self.units[-1].slots)


def make_meta_model(config: PreTrainedConfig, dtype: torch.dtype, source: str) -> MetaModel:
    """Builds a model whose parameters take no memory."""
    accelerate = optional("accelerate", "streaming weights", "offload")
    with accelerate.init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # parameters were made anew on the way out of memory
    # Without such a file what from_config made of the model's config holds, as in from_pretrained.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    model.generation_config.cache_implementation = None
    return split_model(model.eval())


def split_model(model: PreTrainedModel) -> MetaModel:
    """Finds a model's layers, head and embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    prefix, layers = _find_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    if not isinstance(head, nn.Module) or id(embedding) not in names:
        raise ValueError(
            f"{type(model).__name__} has no output head or no embedding that weights could be"
            " streamed to; give --weights device"
        )
    (table,) = [s for s in _slots(embedding, names[id(embedding)]) if s.attribute == "weight"]
    units = [
        Unit(f"{prefix}.{index}", layer, index, tuple(_slots(layer, f"{prefix}.{index}")))
        for index, layer in enumerate(layers)
    ]
    head_slots = tuple(_slots(head, names[id(head)]))
    if head.weight is embedding.weight:
        head_slots = tuple(
            replace(slot, name=table.name)
            if slot.owner is head and slot.attribute == "weight"
            else slot
            for slot in head_slots
        )
    units.append(Unit(names[id(head)], head, None, head_slots))
    taken = {id(slot.owner) for unit in units for slot in unit.slots} | {id(embedding)}
    others = tuple(slot for slot in _slots(model, "") if id(slot.owner) not in taken)
    return MetaModel(model, tuple(units), table, others)


def _slots(module: nn.Module, prefix: str) -> Iterator[ParameterSlot]:
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                full = ".".join(part for part in (prefix, name, attribute) if part)
                yield ParameterSlot(full, owner, attribute, parameter.shape, parameter.dtype)


def _find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Finds the decoder layers: the largest list of the length that the config names."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of {count} decoder layers that weights could be"
            " streamed to; give --weights device"
        )
    _, name, layers = max(lists, key=lambda found: found[0])
    return name, layers


_COMPARED = 1 << 20
"""Bytes of an embedding that are compared with the head's at once."""


class NeedsConversion(Exception):
    """A checkpoint cannot be read as it is; says why."""


def named_keys(meta: MetaModel, files: CheckpointFiles) -> dict[str, tuple[str, str | None]]:
    """Maps each stored tensor to its parameter's name, and the pattern by which it is changed."""
    model = meta.model
    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [own for own in transforms if isinstance(own, WeightRenaming)]
    converters = [own for own in transforms if isinstance(own, WeightConverter)]
    named = {
        key: rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        for key in files.tensors
    }
    table = meta.embedding.name
    if meta.is_tied and all(name != table for name, _ in named.values()):
        # Some checkpoints store tied weights as the head's.
        named = {
            key: (table if name == _head_name(meta) else name, pattern)
            for key, (name, pattern) in named.items()
        }
    return named


def _head_name(meta: MetaModel) -> str:
    """Name of the head's own weight, where it is not tied."""
    return f"{meta.units[-1].name}.weight"


def untie_if_stored_apart(meta: MetaModel, files: CheckpointFiles) -> MetaModel:
    """Gives the head its own weights where the files have others than the embedding's for it.

    `from_pretrained` believes the files rather than the config too.
    """
    if not meta.is_tied:
        return meta
    stored = {name: files.tensors[key] for key, (name, _) in named_keys(meta, files).items()}
    table, own = stored.get(meta.embedding.name), stored.get(_head_name(meta))
    if table is None or own is None or _are_equal(files, table, own):
        return meta
    head: Any = meta.units[-1].module
    head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    return split_model(meta.model)


def _are_equal(files: CheckpointFiles, first: StoredTensor, second: StoredTensor) -> bool:
    """Compares two tensors, a part at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for start in range(0, first.nbytes, _COMPARED):
        size = min(_COMPARED, first.nbytes - start)
        parts = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        for stored, part in zip((first, second), parts, strict=True):
            files.read_into(stored.file, stored.start + start, bytes_of(part))
        if not torch.equal(*parts):
            return False
    return True


def map_weights(meta: MetaModel, files: CheckpointFiles) -> dict[str, StoredTensor]:
    """Finds every parameter in the files."""
    found: dict[str, StoredTensor] = {}
    for key, (name, pattern) in named_keys(meta, files).items():
        if pattern is not None:
            raise NeedsConversion(f"transformers changes {key} when it loads it")
        found[name] = files.tensors[key]
    missing = sorted(slot.name for slot in meta.slots if slot.name not in found)
    if missing:
        raise ValueError(
            f"'{files.paths[0].parent}' is incomplete: {len(missing)} parameters are not in its"
            f" weights (the first is {missing[0]}); get the model again"
        )
    for slot in meta.slots:
        stored = found[slot.name]
        if stored.dtype != slot.dtype:
            raise NeedsConversion(f"{slot.name} is {stored.dtype} in the files, not {slot.dtype}")
        if stored.shape != tuple(slot.shape):
            raise ValueError(
                f"the weights have {slot.name} with shape {list(stored.shape)}, the config asks for"
                f" {list(slot.shape)}; get the model again"
            )
    return found


_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}


def open_converted(
    meta: MetaModel,
    files: CheckpointFiles,
    folder: Path,
) -> tuple[CheckpointFiles, dict[str, StoredTensor]]:
    """Opens a checkpoint's converted copy in a folder, and writes it first if it is not there.

    Copies of what the checkpoint held before it changed are deleted then.
    """
    source = files.paths[0].absolute()
    forms = sorted({slot.form for unit in meta.units for slot in unit.slots})
    parts = (str(source), files.identity, [forms, type(meta.model).__name__])
    place, content, form = (digest(json.dumps(part))[:12] for part in parts)
    stem = f"{source.parent.name}-{place}"
    path = folder / f"{stem}-{content}-{form}.safetensors"
    if not path.exists():
        convert(meta, files, path)
        for other in folder.glob(f"{glob.escape(stem)}-*-*.safetensors*"):
            if not other.name.startswith(f"{stem}-{content}-"):
                with contextlib.suppress(OSError):
                    other.unlink()
    try:
        copy = CheckpointFiles([path])
        return copy, map_weights(meta, copy)
    except (ValueError, NeedsConversion) as error:
        raise ValueError(
            f"'{path}', a copy of the weights for streaming, is damaged; delete it, and it is made"
            " again"
        ) from error


def convert(
    meta: MetaModel,
    files: CheckpointFiles,
    path: Path,
) -> None:
    """Writes each layer contiguously, changed as transformers changes it when it loads it.

    At most one layer is in memory. The file appears when it is complete; a process that wants it
    too waits, and what a killed one has left is written over.
    """
    import fcntl

    groups = _groups(meta, files)
    header, total = _header([slot for slots, _ in groups for slot in slots])
    draft = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("ab") as file, Progress("rewriting the weights", unit="bytes") as progress:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists():
                return
            file.truncate(0)
            if shutil.disk_usage(path.parent).free < total:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.write(header)
            for slots, part in groups:
                for tensor in _load(meta.model, slots, part):
                    file.write(bytes_of(tensor))
                written = {slot.name for slot in slots}
                for slot in meta.slots:
                    if slot.name in written:
                        slot.empty()
                progress.update(file.tell(), total)
            file.flush()
            os.fsync(file.fileno())
            draft.replace(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"the weights must be written anew to be streamed, {total} bytes to '{path}', and that"
            f" failed ({reason}); give another --converted folder with room, or --weights device"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


class _LazyTensor:
    """What transformers takes for a tensor that is not read yet."""

    def __init__(self, files: CheckpointFiles, stored: StoredTensor) -> None:
        self._files = files
        self._stored = stored

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._files.read(self._stored)[index]

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._stored.shape)


def _groups(
    meta: MetaModel, files: CheckpointFiles
) -> list[tuple[list[ParameterSlot], dict[str, _LazyTensor]]]:
    """What is written, in groups that are loaded together, and the tensors that fill each.

    Tied weights are written once. The last group are buffers that the files hold, such as an
    expert's bias; the model keeps them.
    """
    named = named_keys(meta, files)
    owners, held = dict(meta.model.named_modules()), dict(meta.model.named_buffers())
    buffers = []
    for name in sorted({name for name, _ in named.values()} & set(held)):
        owner, _, attribute = name.rpartition(".")
        slot = ParameterSlot(name, owners[owner], attribute, held[name].shape, held[name].dtype)
        buffers.append(slot)
    seen: set[str] = set()
    groups = []
    for slots in (*(unit.slots for unit in meta.units), (meta.embedding,), meta.others, buffers):
        fresh = {slot.name: slot for slot in slots if slot.name not in seen}
        seen |= fresh.keys()
        keys = [key for key, (name, _) in named.items() if name in fresh]
        part = {key: _LazyTensor(files, files.tensors[key]) for key in keys}
        groups.append((list(fresh.values()), part))
    return groups


def _load(model: Any, group: list[ParameterSlot], part: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Fills parameters as transformers does, and gives what is to be written for them."""
    if not group:
        return
    transforms: list[Any] = list(get_model_conversion_mapping(model))
    config = LoadStateDictConfig(dtype=model.dtype, weight_mapping=transforms)
    info, _ = convert_and_load_state_dict_in_model(model, part, config)
    for slot in group:
        own = getattr(slot.owner, slot.attribute)
        if own.device.type == "meta":
            # Tied weights lie where the checkpoint has them: in the embedding or in the head.
            own = model.get_parameter(slot.name)
        if own.device.type == "meta":
            raise ValueError(_why_missing(slot, info))
        yield slot.to_bytes(own.detach())


def _why_missing(slot: ParameterSlot, info: Any) -> str:
    if any(slot.name in entry for entry in info.mismatched_keys):
        return (
            f"the weights have {slot.name} in another shape than the config asks for; get the"
            " model again"
        )
    if slot.name in info.missing_keys and not info.conversion_errors:
        return f"the weights lack {slot.name}; get the model again"
    return (
        f"{slot.name} is in the weights, but transformers {transformers.__version__} could not make"
        " it of them for streaming; give --weights device"
    )


def _header(slots: list[ParameterSlot]) -> tuple[bytes, int]:
    """The beginning of a safetensors file, and the bytes of the file."""
    entries: dict[str, Any] = {}
    end = 0
    for slot in slots:
        entries[slot.name] = {
            "dtype": _NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [end, end + slot.nbytes],
        }
        end += slot.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format's alignment
    header = len(text).to_bytes(8, "little") + text
    return header, len(header) + end
