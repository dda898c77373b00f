"""Weights as the model wants them: names, dtypes, ties."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
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

from h2okv.offload.checkpoint import DTYPES, CheckpointFiles, Stored, bytes_of
from h2okv.offload.meta_model import Skeleton, Slot, Unit, split_model

_ALIGNMENT = 64
_SMALL_PIECE = 1 << 20
"""A disk is as fast on pieces of this size as on a whole layer; in smaller ones it is not."""
_FEW_PIECES = 4
_COMPARED = 1 << 20
"""Bytes of an embedding that are compared with the head's at once."""


@dataclass(frozen=True)
class Piece:
    """Bytes that are read at once.

    Attributes:
        file: Index of the checkpoint's file.
        start: The first byte there.
        nbytes: How many.
        offset: Where they go in the unit's buffer.
    """

    file: int
    start: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class UnitLayout:
    """How a unit lies in the files and in a buffer.

    Attributes:
        unit: The unit.
        pieces: What is read.
        offsets: For each of the unit's slots, the first byte in the buffer.
        buffer_bytes: Size of the buffer.
    """

    unit: Unit
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    buffer_bytes: int


class NeedsConversion(Exception):
    """A checkpoint cannot be read as it is; says why."""


def named_keys(skeleton: Skeleton, files: CheckpointFiles) -> dict[str, tuple[str, str | None]]:
    """For each tensor in the files the parameter's name, and the pattern by which it is changed."""
    model = skeleton.model
    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [own for own in transforms if isinstance(own, WeightRenaming)]
    converters = [own for own in transforms if isinstance(own, WeightConverter)]
    named = {
        key: rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        for key in files.tensors
    }
    table = skeleton.table.name
    if skeleton.is_tied and all(name != table for name, _ in named.values()):
        # Some checkpoints store tied weights as the head's.
        named = {
            key: (table if name == skeleton.head_name else name, pattern)
            for key, (name, pattern) in named.items()
        }
    return named


def untie_if_stored_apart(skeleton: Skeleton, files: CheckpointFiles) -> Skeleton:
    """Gives the head its own weights where the files have others than the embedding's for it.

    `from_pretrained` believes the files rather than the config too.
    """
    if not skeleton.is_tied:
        return skeleton
    stored = {name: files.tensors[key] for key, (name, _) in named_keys(skeleton, files).items()}
    table, own = stored.get(skeleton.table.name), stored.get(skeleton.head_name)
    if table is None or own is None or _are_equal(files, table, own):
        return skeleton
    head: Any = skeleton.units[-1].module
    head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    return split_model(skeleton.model)


def _are_equal(files: CheckpointFiles, first: Stored, second: Stored) -> bool:
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


def map_weights(skeleton: Skeleton, files: CheckpointFiles) -> dict[str, Stored]:
    """Finds every parameter in the files."""
    found: dict[str, Stored] = {}
    for key, (name, pattern) in named_keys(skeleton, files).items():
        if pattern is not None:
            raise NeedsConversion(f"transformers changes {key} when it loads it")
        found[name] = files.tensors[key]
    slots = skeleton.slots
    missing = sorted(slot.name for slot in slots if slot.name not in found)
    if missing:
        raise ValueError(
            f"'{files.paths[0].parent}' is incomplete: {len(missing)} parameters are not in its"
            f" weights (the first is {missing[0]}); get the model again"
        )
    for slot in slots:
        _check(slot, found[slot.name])
    return found


def _check(slot: Slot, stored: Stored) -> None:
    if stored.dtype != slot.dtype:
        raise NeedsConversion(f"{slot.name} is {stored.dtype} in the files, not {slot.dtype}")
    if stored.shape != tuple(slot.shape):
        raise ValueError(
            f"the weights have {slot.name} with shape {list(stored.shape)}, the config asks for"
            f" {list(slot.shape)}; get the model again"
        )


def lay_out(unit: Unit, found: dict[str, Stored]) -> UnitLayout:
    """Finds the fewest reads that bring a unit into a buffer."""
    order = sorted(unit.slots, key=lambda slot: (found[slot.name].file, found[slot.name].start))
    pieces: list[Piece] = []
    places: dict[int, int] = {}
    end = 0
    for slot in order:
        stored = found[slot.name]
        last = pieces[-1] if pieces else None
        if last and (last.file, last.start + last.nbytes) == (stored.file, stored.start):
            pieces[-1] = Piece(last.file, last.start, last.nbytes + stored.nbytes, last.offset)
        else:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            pieces.append(Piece(stored.file, stored.start, stored.nbytes, end))
        places[id(slot)] = end
        if end % slot.dtype.itemsize:
            raise NeedsConversion(f"{slot.name} is not aligned in its file")
        end += stored.nbytes
    if len(pieces) > _FEW_PIECES and end / len(pieces) < _SMALL_PIECE:
        raise NeedsConversion(f"{unit.name} is scattered over {len(pieces)} places")
    offsets = tuple(places[id(slot)] for slot in unit.slots)
    return UnitLayout(unit, tuple(pieces), offsets, end)


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PADDING = 64


def converted_path(folder: Path, files: CheckpointFiles, skeleton: Skeleton) -> Path:
    """Names the file that a checkpoint is converted to."""
    forms = sorted({slot.form for unit in skeleton.units for slot in unit.slots})
    source = [str(files.paths[0].resolve()), files.identity, forms, type(skeleton.model).__name__]
    digest = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]
    return folder / f"{files.paths[0].resolve().parent.name}-{digest}.safetensors"


def read_converted(path: Path, skeleton: Skeleton) -> tuple[CheckpointFiles, dict[str, Stored]]:
    """Opens a file that `convert` made."""
    try:
        files = CheckpointFiles([path])
        return files, map_weights(skeleton, files)
    except (ValueError, NeedsConversion) as error:
        raise ValueError(
            f"'{path}', a copy of the weights for streaming, is damaged; delete it, and it is made"
            " again"
        ) from error


def convert(
    skeleton: Skeleton,
    files: CheckpointFiles,
    path: Path,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes every layer in one piece, changed as transformers changes it when it loads it.

    No more than one layer is in memory. The file appears when it is complete.
    """
    groups = _new_slots(skeleton, files)
    header, total = _header([slot for group in groups for slot in group])
    try:
        with _draft(path, len(header) + total) as file:
            file.write(header)
            done = 0
            for group, part in zip(groups, _parts(skeleton, files, groups), strict=True):
                for tensor in _load(skeleton.model, group, part):
                    file.write(bytes_of(tensor))
                    done += tensor.nbytes
                written = {slot.name for slot in group}
                for slot in skeleton.slots:
                    if slot.name in written:
                        slot.empty()
                show(done, total)
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

    def __init__(self, files: CheckpointFiles, stored: Stored) -> None:
        self._files = files
        self._stored = stored

    def __getitem__(self, index: Any) -> torch.Tensor:
        host = torch.empty(self._stored.shape, dtype=self._stored.dtype)
        self._files.read_into(self._stored.file, self._stored.start, bytes_of(host))
        return host[index]

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._stored.shape)


class _Buffer(Slot):
    """A buffer that the files hold, such as an expert's bias; the model keeps it."""


def _new_slots(skeleton: Skeleton, files: CheckpointFiles) -> list[list[Slot]]:
    """What is written, in groups that are loaded together; tied weights once."""
    modules = dict(skeleton.model.named_modules())
    sizes = dict(skeleton.model.named_buffers())
    buffers = []
    for full in sorted({name for name, _ in named_keys(skeleton, files).values()} & set(sizes)):
        owner, _, attribute = full.rpartition(".")
        own = sizes[full]
        buffers.append(_Buffer(full, modules[owner], attribute, own.shape, own.dtype))
    seen: set[str] = set()
    groups: list[list[Slot]] = []
    for group in (*(u.slots for u in skeleton.units), (skeleton.table,), skeleton.rest, buffers):
        groups.append([slot for slot in group if slot.name not in seen])
        seen |= {slot.name for slot in group}
    return groups


def _parts(
    skeleton: Skeleton, files: CheckpointFiles, groups: list[list[Slot]]
) -> list[dict[str, _LazyTensor]]:
    """For each group the tensors in the files that fill it."""
    group_of = {slot.name: index for index, group in enumerate(groups) for slot in group}
    parts: list[dict[str, _LazyTensor]] = [{} for _ in groups]
    for key, (name, _) in named_keys(skeleton, files).items():
        if name in group_of:
            parts[group_of[name]][key] = _LazyTensor(files, files.tensors[key])
    return parts


def _load(model: Any, group: list[Slot], part: dict[str, Any]) -> Iterator[torch.Tensor]:
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


def _why_missing(slot: Slot, info: Any) -> str:
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


def _header(slots: list[Slot]) -> tuple[bytes, int]:
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
