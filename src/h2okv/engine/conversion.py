"""A checkpoint written anew, once, so that each layer can be read in one go."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from h2okv.engine.checkpoint_files import DTYPES, CheckpointFiles, Stored, bytes_of
from h2okv.engine.skeleton import Skeleton, Slot
from h2okv.engine.weight_map import NeedsConversion, map_weights, named_keys

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PADDING = 64


def converted_path(folder: Path, files: CheckpointFiles, skeleton: Skeleton) -> Path:
    """Names the file that a checkpoint is converted to.

    Args:
        folder: Where such files are kept.
        files: The checkpoint.
        skeleton: The model, in the dtype that it shall run in.

    Returns:
        A path that no other checkpoint, dtype or model has.
    """
    forms = sorted({slot.form for unit in skeleton.units for slot in unit.slots})
    source = [str(files.paths[0].resolve()), files.identity, forms, type(skeleton.model).__name__]
    digest = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]
    return folder / f"{files.paths[0].resolve().parent.name}-{digest}.safetensors"


def read_converted(path: Path, skeleton: Skeleton) -> tuple[CheckpointFiles, dict[str, Stored]]:
    """Opens a file that `convert` made.

    Args:
        path: From `converted_path`.
        skeleton: The model.

    Returns:
        The file, and where each parameter lies in it.

    Raises:
        ValueError: If it is damaged.
    """
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

    Args:
        skeleton: The model; its parameters are filled and emptied again.
        files: The checkpoint.
        path: The new file.
        show: Gets the bytes written and all bytes.

    Raises:
        ValueError: If the disk is full, or the checkpoint is incomplete.
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
