"""A checkpoint written anew, once, so that each layer can be read in one go."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from h2okv.engine.checkpoint_files import CheckpointFiles, Stored, bytes_of
from h2okv.engine.skeleton import Skeleton, Slot

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
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
    groups = [*(unit.slots for unit in skeleton.units), (skeleton.table,), skeleton.rest]
    seen: set[str] = set()
    groups = [tuple(slot for slot in group if _is_new(slot, seen)) for group in groups]
    header, total = _header([slot for group in groups for slot in group])
    draft = path.with_name(path.name + f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(header)
            done = 0
            for group, load in zip(groups, _loaders(skeleton, files, groups), strict=True):
                load()
                for slot in group:
                    file.write(bytes_of(_loaded(slot)))
                    slot.empty()
                    done += slot.nbytes
                show(done, total)
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


def _loaders(
    skeleton: Skeleton, files: CheckpointFiles, groups: Iterable[tuple[Slot, ...]]
) -> list[Callable[[], None]]:
    """For each group of parameters what fills them."""
    model = skeleton.model
    transforms: list[Any] = list(get_model_conversion_mapping(model))
    renamings = [own for own in transforms if isinstance(own, WeightRenaming)]
    converters = [own for own in transforms if isinstance(own, WeightConverter)]
    state = model.state_dict()
    group_of = {slot.name: index for index, group in enumerate(groups) for slot in group}
    parts: list[dict[str, Any]] = [{} for _ in groups]
    for key, stored in files.tensors.items():
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name in group_of:
            parts[group_of[name]][key] = _LazyTensor(files, stored)
    dtype: Any = model.dtype
    config = LoadStateDictConfig(dtype=dtype, weight_mapping=transforms)

    def loader(part: dict[str, Any]) -> Callable[[], None]:
        return lambda: _load(model, part, config)

    return [loader(part) for part in parts]


def _load(model: Any, part: dict[str, Any], config: LoadStateDictConfig) -> None:
    convert_and_load_state_dict_in_model(model, part, config)


def _loaded(slot: Slot) -> torch.Tensor:
    parameter: Any = slot.owner._parameters[slot.attribute]
    if parameter.device.type == "meta":
        raise ValueError(
            f"the weights lack {slot.name}, or have it in another shape than the config asks for;"
            " get the model again"
        )
    return slot.to_bytes(parameter.detach())


def _is_new(slot: Slot, seen: set[str]) -> bool:
    """Tells whether a name was not met before (tied weights have one)."""
    if slot.name in seen:
        return False
    seen.add(slot.name)
    return True


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
