"""Weights as the model wants them: names, dtypes, ties."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from h2okv.offload.checkpoint import DTYPES, CheckpointFiles, StoredTensor, bytes_of
from h2okv.offload.meta_model import MetaModel, ParameterSlot, Unit, split_model
from h2okv.provenance import digest

_ALIGNMENT = 64
_SMALL_EXTENT = 1 << 20
"""Disks read extents of this size as fast as whole layers, and smaller ones slower."""
_FEW_EXTENTS = 4
_COMPARED = 1 << 20
"""Bytes of an embedding that are compared with the head's at once."""


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a file, read to an offset of the unit's buffer."""

    file: int
    start: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class UnitLayout:
    """How a unit lies in the files and in a buffer; ``offsets`` are those of its slots."""

    unit: Unit
    extents: tuple[Extent, ...]
    offsets: tuple[int, ...]
    buffer_bytes: int

    def fill(self, buffer: torch.Tensor) -> None:
        """Installs views of a uint8 buffer as the unit's parameters."""
        for slot, offset in zip(self.unit.slots, self.offsets, strict=True):
            slot.fill_from(buffer, offset)


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
            key: (table if name == meta.head_name else name, pattern)
            for key, (name, pattern) in named.items()
        }
    return named


def untie_if_stored_apart(meta: MetaModel, files: CheckpointFiles) -> MetaModel:
    """Gives the head its own weights where the files have others than the embedding's for it.

    `from_pretrained` believes the files rather than the config too.
    """
    if not meta.is_tied:
        return meta
    stored = {name: files.tensors[key] for key, (name, _) in named_keys(meta, files).items()}
    table, own = stored.get(meta.embedding.name), stored.get(meta.head_name)
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
    slots = meta.slots
    missing = sorted(slot.name for slot in slots if slot.name not in found)
    if missing:
        raise ValueError(
            f"'{files.paths[0].parent}' is incomplete: {len(missing)} parameters are not in its"
            f" weights (the first is {missing[0]}); get the model again"
        )
    for slot in slots:
        _check(slot, found[slot.name])
    return found


def _check(slot: ParameterSlot, stored: StoredTensor) -> None:
    if stored.dtype != slot.dtype:
        raise NeedsConversion(f"{slot.name} is {stored.dtype} in the files, not {slot.dtype}")
    if stored.shape != tuple(slot.shape):
        raise ValueError(
            f"the weights have {slot.name} with shape {list(stored.shape)}, the config asks for"
            f" {list(slot.shape)}; get the model again"
        )


def lay_out(unit: Unit, found: dict[str, StoredTensor]) -> UnitLayout:
    """Finds the fewest reads that bring a unit into a buffer."""
    order = sorted(unit.slots, key=lambda slot: (found[slot.name].file, found[slot.name].start))
    extents: list[Extent] = []
    places: dict[int, int] = {}
    end = 0
    for slot in order:
        stored = found[slot.name]
        last = extents[-1] if extents else None
        if last and (last.file, last.start + last.nbytes) == (stored.file, stored.start):
            extents[-1] = Extent(last.file, last.start, last.nbytes + stored.nbytes, last.offset)
        else:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            extents.append(Extent(stored.file, stored.start, stored.nbytes, end))
        places[id(slot)] = end
        if end % slot.dtype.itemsize:
            raise NeedsConversion(f"{slot.name} is not aligned in its file")
        end += stored.nbytes
    if len(extents) > _FEW_EXTENTS and end / len(extents) < _SMALL_EXTENT:
        raise NeedsConversion(f"{unit.name} is scattered over {len(extents)} places")
    offsets = tuple(places[id(slot)] for slot in unit.slots)
    return UnitLayout(unit, tuple(extents), offsets, end)


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PADDING = 64


def open_converted(
    meta: MetaModel,
    files: CheckpointFiles,
    folder: Path,
    report: Callable[[int, int], None] = lambda done, total: None,
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
        convert(meta, files, path, report)
        for other in folder.glob(f"{glob.escape(stem)}-*-*.safetensors"):
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
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes each layer contiguously, changed as transformers changes it when it loads it.

    At most one layer is in memory. The file appears when it is complete.
    """
    groups = _new_slots(meta, files)
    header, total = _header([slot for group in groups for slot in group])
    try:
        with _draft(path, len(header) + total) as file:
            file.write(header)
            done = 0
            for group, part in zip(groups, _parts(meta, files, groups), strict=True):
                for tensor in _load(meta.model, group, part):
                    file.write(bytes_of(tensor))
                    done += tensor.nbytes
                written = {slot.name for slot in group}
                for slot in meta.slots:
                    if slot.name in written:
                        slot.empty()
                report(done, total)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"the weights must be written anew to be streamed, {total} bytes to '{path}', and that"
            f" failed ({reason}); give another --converted folder with room, or --weights device"
        ) from error


@contextlib.contextmanager
def _draft(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file beside the path that takes its place when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    if shutil.disk_usage(path.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _remove_abandoned(path: Path) -> None:
    """Deletes what killed processes had written of a file; it may be as large as the model."""
    for draft in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), draft.open("rb") as file:
            _lock(file)
            draft.unlink()


def _lock(file: Any) -> None:
    """Locks a file until it is closed or this process is killed."""
    with contextlib.suppress(ImportError):  # a system without it
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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


class _Buffer(ParameterSlot):
    """A buffer that the files hold, such as an expert's bias; the model keeps it."""


def _new_slots(meta: MetaModel, files: CheckpointFiles) -> list[list[ParameterSlot]]:
    """What is written, in groups that are loaded together; tied weights once."""
    modules = dict(meta.model.named_modules())
    sizes = dict(meta.model.named_buffers())
    buffers = []
    for full in sorted({name for name, _ in named_keys(meta, files).values()} & set(sizes)):
        owner, _, attribute = full.rpartition(".")
        own = sizes[full]
        buffers.append(_Buffer(full, modules[owner], attribute, own.shape, own.dtype))
    seen: set[str] = set()
    groups: list[list[ParameterSlot]] = []
    for group in (*(u.slots for u in meta.units), (meta.embedding,), meta.others, buffers):
        groups.append([slot for slot in group if slot.name not in seen])
        seen |= {slot.name for slot in group}
    return groups


def _parts(
    meta: MetaModel, files: CheckpointFiles, groups: list[list[ParameterSlot]]
) -> list[dict[str, _LazyTensor]]:
    """For each group the tensors in the files that fill it."""
    group_of = {slot.name: index for index, group in enumerate(groups) for slot in group}
    parts: list[dict[str, _LazyTensor]] = [{} for _ in groups]
    for key, (name, _) in named_keys(meta, files).items():
        if name in group_of:
            parts[group_of[name]][key] = _LazyTensor(files, files.tensors[key])
    return parts


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
    """The beginning of a safetensors file, and the bytes of the tensors after it."""
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
    text += b" " * (-(8 + len(text)) % _PADDING)
    return len(text).to_bytes(8, "little") + text, end
