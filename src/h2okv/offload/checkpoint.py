"""A checkpoint on disk: its files, tensors and digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from h2okv.records import file_error

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_AGAIN = "get the model again"
_MAX_HEADER = 100 << 20
"""The format's own limit."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``file`` indexes `CheckpointFiles.paths`, ``start`` counts bytes."""

    file: int
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckpointFiles:
    """The files of a checkpoint, open for reading at any offset by any thread."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self.tensors: dict[str, StoredTensor] = {}
        self._descriptors: list[int] = []
        self._states: list[tuple[int, int]] = []
        try:
            for index, path in enumerate(self.paths):
                self._open(index, path)
        except ValueError:
            self.close()
            raise

    @classmethod
    def in_folder(cls, folder: Path) -> CheckpointFiles:
        """Opens a checkpoint as ``save_pretrained`` writes it, in one file or in shards."""
        if (folder / _SINGLE).is_file():
            return cls([folder / _SINGLE])
        if not (folder / _INDEX).is_file():
            raise ValueError(
                f"'{folder}' has no weights in safetensors files, which streaming needs; save the"
                " model with save_pretrained, or give --weights device"
            )
        return cls(folder / name for name in _shards(folder / _INDEX))

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    @property
    def identity(self) -> list[tuple[str, int, int]]:
        """Names, sizes and modification times of the files."""
        return [(path.name, *state) for path, state in zip(self.paths, self._states, strict=True)]

    def read_into(self, file: int, start: int, target: memoryview) -> None:
        """Reads bytes; safe in any thread."""
        path, descriptor = self.paths[file], self._descriptors[file]
        done = 0
        try:
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], start + done)
                if count == 0:
                    break
                done += count
            state = _state(descriptor)
        except OSError as error:
            raise ValueError(f"'{path}' cannot be read any more ({error.strerror})") from error
        if done < len(target) or state != self._states[file]:
            raise ValueError(
                f"'{path}' has changed while the model ran from it; leave the weights as they are"
                " during a job, and run the command again"
            )

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """Reads a tensor, to the CPU."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(stored.file, stored.start, bytes_of(tensor))
        return tensor

    def drop_pages(self, file: int, start: int, size: int) -> None:
        """Lets the operating system drop these bytes from its page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptors[file], start, size, os.POSIX_FADV_DONTNEED)

    def _open(self, index: int, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            size, _ = state = _state(descriptor)
            self._states.append(state)
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            is_header = 0 < length <= min(_MAX_HEADER, size - 8)
            header = json.loads(os.pread(descriptor, length, 8)) if is_header else None
        except OSError as error:
            raise file_error(path, "read", error, _AGAIN) from error
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise ValueError(
                f"'{path}' is no safetensors file, or cut off at its beginning; {_AGAIN}"
            )
        header.pop("__metadata__", None)
        try:
            found = {name: _stored(index, 8 + length, own) for name, own in header.items()}
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"'{path}' has a damaged header; {_AGAIN}") from error
        end = max((stored.start + stored.nbytes for stored in found.values()), default=0)
        if end > size:
            raise ValueError(f"'{path}' is cut off: it has {size} bytes of {end}; {_AGAIN}")
        self.tensors |= found


def checkpoint_bytes(folder: Path) -> int:
    """Size of a folder's weights, in whatever format."""
    try:
        paths = [folder / name for name in _shards(folder / _INDEX)]
    except ValueError:
        paths = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(path.stat().st_size for path in paths if path.exists())


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"'{index}' is damaged ({error}); {_AGAIN}") from error


def _stored(file: int, base: int, entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return StoredTensor(file, base + start, end - start, DTYPES[entry["dtype"]], shape)


def _state(descriptor: int) -> tuple[int, int]:
    """Size and modification time of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, writable."""
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


_SAMPLES = 64
_SAMPLE_BYTES = 4096
"""Read at each of so many places of a file; another training run changes all of them."""


def weights_digest(config: PreTrainedConfig) -> str | None:
    """Identifies the weights that belong to a config: by samples, or by the Hub's commit."""
    folder = Path(config.name_or_path or "")
    if not config.name_or_path or not folder.is_dir():
        commit: Any = getattr(config, "_commit_hash", None)
        return commit
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size} ".encode())
                for index in range(_SAMPLES):
                    file.seek(index * size // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise file_error(path, "read", error, _AGAIN) from error
    return digest.hexdigest()[:16]
