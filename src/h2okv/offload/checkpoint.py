"""A checkpoint on disk: its files, tensors and digest."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.modeling_utils import str_to_torch_dtype

from h2okv.records import file_error, naming

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_AGAIN = "get the model again"
_ALIGNMENT = 64


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

    Nothing stays mapped: mapped weights count as data of the process, and thrash where they do not
    fit.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self.tensors: dict[str, StoredTensor] = {}
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
        done, count = 0, -1
        try:
            while done < len(target) and count:
                count = os.preadv(descriptor, [target[done:]], start + done)
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

    def _open(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            self._states.append(_state(descriptor))
            start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            # Tensors fill a safetensors file without gaps: their sizes tell where they begin.
            with safe_open(path, framework="np") as header:
                for name in header.offset_keys():
                    entry = header.get_slice(name)
                    dtype = str_to_torch_dtype[entry.get_dtype()]
                    shape = tuple(entry.get_shape())
                    size = math.prod(shape) * dtype.itemsize
                    number = len(self._states) - 1
                    self.tensors[name] = StoredTensor(number, start, size, dtype, shape)
                    start += size
        except OSError as error:
            raise file_error(path, "read", error, _AGAIN) from error
        except (SafetensorError, LookupError) as error:
            raise ValueError(f"'{path}' is damaged or cut off ({error}); {_AGAIN}") from error


def checkpoint_bytes(folder: Path) -> int:
    """Size of a folder's weights, in whatever format."""
    paths = [*folder.glob("model*.safetensors")] or [*folder.glob("*.bin")]
    return sum(path.stat().st_size for path in paths)


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"'{index}' is damaged ({error}); {_AGAIN}") from error


def _state(descriptor: int) -> tuple[int, int]:
    """Size and modification time of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


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
        with naming(path, "read", _AGAIN), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} ".encode())
            for index in range(_SAMPLES):
                file.seek(index * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, writable."""
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


Part = tuple[torch.Size, torch.dtype]
"""A tensor's shape and dtype, for its place among others in one block of bytes."""


def block_bytes(parts: Sequence[Part]) -> int:
    """Bytes of a block with all parts, each where numbers of any dtype may begin."""
    sizes = (shape.numel() * dtype.itemsize for shape, dtype in parts)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def parts_of(block: torch.Tensor, parts: Sequence[Part]) -> Iterator[torch.Tensor]:
    """Views of a uint8 block, one for each part."""
    start = 0
    for shape, dtype in parts:
        size = shape.numel() * dtype.itemsize
        yield block[start : start + size].view(dtype).view(shape)
        start += block_bytes([(shape, dtype)])
