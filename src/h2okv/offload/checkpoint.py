"""A checkpoint on disk: its files, the parameters in them, its digest, and its converted copy."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from h2okv.console import Progress
from h2okv.models.gguf import CheckpointWriter, temporary_folder
from h2okv.offload.meta_model import (
    MetaModel,
    ParameterSlot,
    Unit,
    block_bytes,
    make_meta_model,
    split_model,
    views_of,
)
from h2okv.provenance import digest
from h2okv.records import naming, parse_json, refusing

_AGAIN = "get the model again"
_COMPARED = 1 << 20  # bytes of embedding and head that are compared at once


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``file`` indexes `CheckpointFiles.paths`, ``start`` counts bytes."""

    file: int
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckpointFiles:
    """The files of a checkpoint, open for reading at any offset by any thread.

    No file stays mapped: mapped weights count as the process's data, and thrash if they do not fit.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self.tensors: dict[str, StoredTensor] = {}
        self.parameters: dict[str, StoredTensor] = {}  # by parameter: see `map_weights`
        self._descriptors: list[int] = []
        self._states: list[tuple[int, int]] = []
        try:
            for path in self.paths:
                self._open(path)
        except ValueError:
            self.close()
            raise

    @classmethod
    def in_folder(cls, folder: Path) -> CheckpointFiles:
        """Open a checkpoint as ``save_pretrained`` writes it, in one file or in shards."""
        if (folder / SAFE_WEIGHTS_NAME).is_file():
            return cls([folder / SAFE_WEIGHTS_NAME])
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if not index.is_file():
            raise ValueError(
                f"'{folder}' has no weights in safetensors files, which streaming needs; save the"
                " model with save_pretrained, or give --weights device"
            )
        try:
            names = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"'{index}' is damaged ({error}); {_AGAIN}") from error
        return cls(folder / name for name in sorted(names))

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    @property
    def identity(self) -> list[tuple[str, int, int]]:
        return [(path.name, *state) for path, state in zip(self.paths, self._states, strict=True)]

    def read_into(self, file: int, start: int, target: memoryview) -> None:
        """Read bytes; safe in any thread."""
        path, descriptor = self.paths[file], self._descriptors[file]
        done, count = 0, -1
        try:
            while done < len(target) and count:
                count = os.preadv(descriptor, [target[done:]], start + done)
                done += count
            state = _state(descriptor)
        except OSError as error:
            raise ValueError(f"'{path}' can no longer be read ({error.strerror})") from error
        if done < len(target) or state != self._states[file]:
            raise ValueError(
                f"'{path}' has changed while the model ran from it; leave the weights as they are"
                " during a job, and run the command again"
            )

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """Read a tensor to the CPU."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(stored.file, stored.start, bytes_of(tensor))
        return tensor

    def read_unit(self, unit: Unit, pinned: bool = False) -> torch.Tensor:
        block = torch.empty(block_bytes(unit.specs), dtype=torch.uint8, pin_memory=pinned)
        self.read_unit_into(unit, block)
        return block

    def read_unit_into(self, unit: Unit, block: torch.Tensor) -> None:
        """Read a unit into a uint8 block on the CPU, in the order of the file."""
        views = zip(unit.slots, views_of(block, unit.specs), strict=True)
        pairs = [(self.parameters[slot.name], view) for slot, view in views]
        for stored, view in sorted(pairs, key=lambda pair: (pair[0].file, pair[0].start)):
            self.read_into(stored.file, stored.start, bytes_of(view))
            self.drop_pages(stored.file, stored.start, stored.nbytes)

    def drop_pages(self, file: int, start: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptors[file], start, size, os.POSIX_FADV_DONTNEED)

    def _open(self, path: Path) -> None:
        damaged = refusing(f"'{path}' is damaged or cut off", _AGAIN, SafetensorError, LookupError)
        with naming(path, "read", _AGAIN), damaged:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            self._states.append(_state(descriptor))
            start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            # Tensors fill a safetensors file without gaps, so their sizes give their offsets.
            with safe_open(path, framework="np") as header:
                for name in header.offset_keys():
                    entry = header.get_slice(name)
                    dtype = str_to_torch_dtype[entry.get_dtype()]
                    shape = tuple(entry.get_shape())
                    size = math.prod(shape) * dtype.itemsize
                    number = len(self._states) - 1
                    self.tensors[name] = StoredTensor(number, start, size, dtype, shape)
                    start += size


def _state(descriptor: int) -> tuple[int, int]:
    """Return the size and modification time of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable."""
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def checkpoint_bytes(folder: Path) -> int:
    """Return the size of a folder's weights, safetensors or not."""
    paths = [*folder.glob("model*.safetensors")] or [*folder.glob("*.bin")]
    return sum(path.stat().st_size for path in paths)


def named_keys(meta: MetaModel, files: CheckpointFiles) -> dict[str, tuple[str, str | None]]:
    """Map each stored tensor to its parameter's name, and the pattern that converts it."""
    model = meta.model
    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    named = {
        key: rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        for key in files.tensors
    }
    table = meta.embedding.name
    if meta.is_tied and all(name != table for name, _ in named.values()):
        # Some checkpoints store tied weights under the head's name.
        named = {
            key: (table if name == _head_name(meta) else name, pattern)
            for key, (name, pattern) in named.items()
        }
    return named


def _head_name(meta: MetaModel) -> str:
    """Return the name of the head's weight if it is not tied."""
    return f"{meta.units[-1].name}.weight"


def open_checkpoint(
    config: PreTrainedConfig, folder: Path, dtype: torch.dtype | None
) -> tuple[MetaModel, CheckpointFiles]:
    """Open a model (``None``: in its dtype); without `parameters` if it must be converted."""
    files = CheckpointFiles.in_folder(folder)
    if dtype is None:
        dtype = getattr(config.get_text_config(), "dtype", None)
    if not isinstance(dtype, torch.dtype):
        dtype = max(files.tensors.values(), key=lambda stored: stored.nbytes).dtype
        dtype = dtype if dtype.is_floating_point else torch.float32
    meta = make_meta_model(config, dtype, str(folder))
    stored = {name: files.tensors[key] for key, (name, _) in named_keys(meta, files).items()}
    table, head_tensor = stored.get(meta.embedding.name), stored.get(_head_name(meta))
    if meta.is_tied and table and head_tensor and not _are_equal(files, table, head_tensor):
        # The files decide, not the config, as in `from_pretrained`.
        head: Any = meta.units[-1].module
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
        meta = split_model(meta.model)
    files.parameters = map_weights(meta, files)
    return meta, files


def _are_equal(files: CheckpointFiles, first: StoredTensor, second: StoredTensor) -> bool:
    """Compare two tensors, a chunk at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for start in range(0, first.nbytes, _COMPARED):
        chunks = [bytearray(min(_COMPARED, first.nbytes - start)) for _ in range(2)]
        for stored, chunk in zip((first, second), chunks, strict=True):
            files.read_into(stored.file, stored.start + start, memoryview(chunk))
        if chunks[0] != chunks[1]:
            return False
    return True


def map_weights(meta: MetaModel, files: CheckpointFiles) -> dict[str, StoredTensor]:
    """Map parameters to tensors of the files; an empty dict if these must be converted."""
    named = named_keys(meta, files)
    if any(pattern is not None for _, pattern in named.values()):
        return {}  # transformers converts a tensor when it loads it
    parameters = {name: files.tensors[key] for key, (name, _) in named.items()}
    missing = sorted(slot.name for slot in meta.slots if slot.name not in parameters)
    if missing:
        raise ValueError(
            f"'{files.paths[0].parent}' is incomplete: {len(missing)} parameters are not in its"
            f" weights (the first is {missing[0]}); {_AGAIN}"
        )
    for slot in meta.slots:
        stored = parameters[slot.name]
        if stored.dtype != slot.dtype:
            return {}
        if stored.shape != tuple(slot.shape):
            raise ValueError(
                f"the weights have {slot.name} with shape {list(stored.shape)}, the config asks for"
                f" {list(slot.shape)}; {_AGAIN}"
            )
    return parameters


def open_converted(meta: MetaModel, files: CheckpointFiles, folder: Path) -> CheckpointFiles:
    """Open a checkpoint's converted copy, writing it if needed; outdated copies are deleted."""
    source = files.paths[0].absolute()
    forms = sorted({slot.form for unit in meta.units for slot in unit.slots})
    keys = (str(source), files.identity, [forms, type(meta.model).__name__])
    source_digest, content_digest, form_digest = (digest(json.dumps(key))[:12] for key in keys)
    stem = f"{source.parent.name}-{source_digest}"
    path = folder / f"{stem}-{content_digest}-{form_digest}"
    if not path.is_dir():
        convert(meta, files, path)
        for other in folder.glob(f"{glob.escape(stem)}-*"):
            if not other.name.startswith(f"{stem}-{content_digest}-"):
                shutil.rmtree(other, ignore_errors=True)
    with contextlib.suppress(ValueError):
        copy = CheckpointFiles.in_folder(path)
        copy.parameters = map_weights(meta, copy)
        if copy.parameters:
            return copy
    raise ValueError(
        f"'{path}', a copy of the weights for streaming, is damaged; delete it, and it is"
        " written again"
    )


def convert(meta: MetaModel, files: CheckpointFiles, path: Path) -> None:
    """Write a folder of weights as transformers converts them; one layer at a time is loaded."""
    named = named_keys(meta, files)
    groups = _groups(meta, named)
    total = sum(slot.nbytes for group in groups for slot in group)
    where = f"{total} bytes to '{path}'"
    problem = f"the weights must be rewritten to be streamed, {where}, which failed"
    remedy = "give XDG_CACHE_HOME another folder with room, or --weights device"
    with temporary_folder(path.parent, ".rewriting-", problem, remedy) as temporary:
        if shutil.disk_usage(temporary).free < total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        writer = CheckpointWriter(temporary)
        with Progress("rewriting the weights", total, "bytes") as bar:
            for group in groups:
                tensors = _load(meta, files, named, group)
                for slot, tensor in zip(group, tensors, strict=True):
                    writer.write(slot.name, tensor)
                    bar.advance(tensor.nbytes)
                written = {slot.name for slot in group}
                for slot in meta.slots:
                    if slot.name in written:
                        slot.empty()
        writer.close()
        with contextlib.suppress(OSError):  # another process wrote it first
            temporary.rename(path)


class _LazyTensor:
    """A tensor of a file that transformers reads when it indexes it."""

    def __init__(self, files: CheckpointFiles, key: str) -> None:
        self._files, self._stored = files, files.tensors[key]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._files.read(self._stored)[index]

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)


def _groups(meta: MetaModel, named: dict[str, tuple[str, str | None]]) -> list[list[ParameterSlot]]:
    """Return the slots to write, in groups loaded together; buffers, of experts, come last."""
    stored, seen, buffers = {name for name, _ in named.values()}, set[str](), []
    for name, buffer in meta.model.named_buffers():
        if name in stored:
            owner, _, attribute = name.rpartition(".")
            location = meta.model.get_submodule(owner), attribute
            buffers.append(ParameterSlot(name, *location, buffer.shape, buffer.dtype))
    groups = []
    for slots in (*(unit.slots for unit in meta.units), (meta.embedding,), meta.others, buffers):
        fresh = {slot.name: slot for slot in slots if slot.name not in seen}
        seen |= fresh.keys()
        groups.append(list(fresh.values()))
    return groups


def _load(
    meta: MetaModel,
    files: CheckpointFiles,
    named: dict[str, tuple[str, str | None]],
    group: list[ParameterSlot],
) -> Iterator[torch.Tensor]:
    """Load parameters as transformers converts them, and yield the tensors to write for them."""
    if not group:
        return
    names = {slot.name for slot in group}
    tensors: dict[str, Any] = {
        key: _LazyTensor(files, key) for key, (name, _) in named.items() if name in names
    }
    model: Any = meta.model
    transforms: list[Any] = list(get_model_conversion_mapping(model))
    config = LoadStateDictConfig(dtype=model.dtype, weight_mapping=transforms)
    info, _ = convert_and_load_state_dict_in_model(model, tensors, config)
    for slot in group:
        tensor = getattr(slot.owner, slot.attribute)
        if tensor.device.type == "meta":
            # Tied weights are loaded by the checkpoint's name: the embedding's or the head's.
            tensor = model.get_parameter(slot.name)
        if tensor.device.type != "meta":
            yield slot.to_bytes(tensor.detach())
        elif any(slot.name in entry for entry in info.mismatched_keys):
            raise ValueError(
                f"the weights have {slot.name} in another shape than the config asks for; {_AGAIN}"
            )
        elif slot.name in info.missing_keys and not info.conversion_errors:
            raise ValueError(f"the weights lack {slot.name}; {_AGAIN}")
        else:
            raise ValueError(
                f"{slot.name} is in the weights, but transformers {transformers.__version__} could"
                " not convert it for streaming; give --weights device"
            )
