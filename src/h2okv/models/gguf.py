"""Convert GGUF files, once each, to safetensors checkpoints in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from h2okv.cache.support import check_model
from h2okv.console import Progress, format_bytes, install_hint, optional, write_remark
from h2okv.models.names import cache_folder, check_gguf, gguf_shards
from h2okv.models.tokenization import add_end_tokens, check_split, correct_tokenizer, metadata_ends
from h2okv.records import first_line, parse_json, refusing, write_json

RECORD = "converted_from.json"  # in a converted folder: the file that it was converted from
_VERSION = 2  # of the conversion; folders of another version are written again
_DAY = 86400.0
_SPARE_BYTES = 64 << 20
_SCALING = ("rope.scaling.type", "rope.scaling.factor")
_SCALING_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight")
# Lists above this length are skipped: parsing a vocabulary takes minutes and much memory.
_LONG = 4096
_SIZES = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}  # of numbers
_STRING = 8


def converted(path: Path) -> Path:
    """Return the checkpoint of a GGUF file, converting it unless that was done before.

    Prints the file, the checkpoint's folder and its size to stderr.
    """
    shards = gguf_shards(path.absolute())
    path = shards[0]
    stats = [_attempt(path, shard.stat) for shard in shards]
    size, changed = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
    source = {"file": str(path), "bytes": size, "changed": changed, "version": _VERSION}
    for folder, record in converted_folders():
        if source in (record, record.pop("also", None)):  # no need to hash a large file
            return folder
    write_remark(f"converting '{path}' ({format_bytes(size)}), once: reading what it holds")
    file = _open(shards)
    digest = _attempt(path, lambda: sha256(*shards))
    folder = cache_folder("models") / f"{path.stem}-{digest[:16]}"
    if not _is_current(folder):
        start = time.perf_counter()
        _write(file, folder, source)
        write_remark(f"converted in {time.perf_counter() - start:.0f} s")
    else:  # from a file that was copied or moved since; the folder may be read-only
        with contextlib.suppress(OSError, ValueError):
            write_json(folder / RECORD, {**dict(converted_folders())[folder], "also": source})
    return folder


def converted_folders() -> Iterator[tuple[Path, dict[str, Any]]]:
    """List the folders of converted checkpoints, with the record of each."""
    # Hidden folders are still being written by another process.
    for record_file in sorted(cache_folder("models").glob(f"[!.]*/{RECORD}")):
        with contextlib.suppress(OSError, ValueError):
            yield record_file.parent, parse_json(record_file.read_text(encoding="utf-8"))


def _is_current(folder: Path) -> bool:
    versions = {other: record.get("version") for other, record in converted_folders()}
    return versions.get(folder) == _VERSION


def sha256(*paths: Path) -> str:
    """Return the digest of a file, or of several as one, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)  # continues the same digest
    return digest.hexdigest()


@contextlib.contextmanager
def temporary_folder(
    cache: Path,
    prefix: str,
    problem: str | None = None,
    remedy: str = "make room there, or set XDG_CACHE_HOME to another folder",
) -> Iterator[Path]:
    """Make a temporary folder in the cache, to be moved into place once it is complete."""
    problem = problem or f"'{cache}' cannot be written"
    with refusing(problem, remedy, OSError, SafetensorError):
        cache.mkdir(parents=True, exist_ok=True)
        for stale in cache.glob(f"{prefix}*"):  # by a process that was killed
            if time.time() - stale.stat().st_mtime > _DAY:
                shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=cache, ignore_cleanup_errors=True
        ) as temporary:
            yield Path(temporary)


def _reader_class() -> Any:
    import gguf

    class LeanReader(gguf.GGUFReader):
        """A reader that repeats a list's first value if it is too long for one value per layer."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            if count <= _LONG or kind not in (*_SIZES, _STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            end = orig_offs + 12
            *_, first = super()._get_field_parts(end, kind)[1]
            if kind == _STRING:
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", data, end)[0]
            else:
                end += count * _SIZES[kind]
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
            return end - orig_offs, [first], [0] * count, types

    return LeanReader


@contextlib.contextmanager
def lean_transformers() -> Iterator[None]:
    """Make transformers skip long lists too."""
    import gguf

    with mock.patch.object(gguf, "GGUFReader", _reader_class()):
        yield


@dataclass(frozen=True)
class _File:
    """A GGUF model: its opened files, with their tensors and metadata."""

    path: Path  # the first file; messages name the model by it
    readers: Sequence[Any]

    @property
    def tensors(self) -> list[Any]:
        return [tensor for reader in self.readers for tensor in reader.tensors]

    @property
    def fields(self) -> dict[str, Any]:
        """Its metadata; of a list, the length."""
        fields = self.readers[0].fields.items()
        return {
            key: len(field.data) if field.types[0].name == "ARRAY" else field.contents()
            for key, field in fields
        }


def _open(shards: Sequence[Path]) -> _File:
    """Open a GGUF model; raise ValueError if it is incomplete, unsupported or not GGUF."""
    path = shards[0]
    for shard in shards:
        check_gguf(shard)
    for name in ("gguf", "accelerate"):
        optional(name, f"model '{path}'", "gguf")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        raise ValueError(
            f"model '{path}' needs transformers 5.24 or later, and {transformers.__version__} is"
            f" installed; {install_hint('gguf')}"
        )
    file = _File(path, [_attempt(shard, partial(_reader_class(), shard)) for shard in shards])
    fields = file.fields
    count = fields.get("split.count", 1)
    if count != len(shards):
        raise ValueError(
            f"model '{path}' is part {fields.get('split.no', 0) + 1} of {count} of a model, but"
            f" its name does not say so; name all parts as they were named, ending in"
            f" -00001-of-{count:05}.gguf, in one folder"
        )
    try:
        doubt = check_split(fields)
    except ValueError as error:
        raise ValueError(f"model '{path}' {error}") from error
    architecture = fields.get("general.architecture")
    names = {tensor.name for tensor in file.tensors}
    scaling = [key for key in _SCALING if fields.get(f"{architecture}.{key}") not in (None, "none")]
    scaling += [name for name in _SCALING_TENSORS if name in names]
    if doubt:
        write_remark(f"note: '{path}' {doubt}")
    if scaling:
        write_remark(
            f"note: '{path}' scales positions for long texts ({', '.join(scaling)}), which"
            " transformers does not read from GGUF files; get the model as safetensors if its texts"
            " get worse with their length"
        )
    return file


def _attempt(path: Path, read: Callable[[], Any]) -> Any:
    """Run a reader; raise ValueError for any failure, whose type depends on the damage."""
    try:
        return read()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = first_line(error)
        if isinstance(error, OSError) and error.errno:
            problem = f"cannot be read ({error.strerror})"
        elif "is not supported yet" in text or "GGMLQuantizationType" in text:
            problem = (
                f"is not of a kind that transformers {transformers.__version__} reads ({text}); get"
                " the model as safetensors"
            )
        else:
            kind = type(error).__name__
            problem = f"is truncated or damaged ({kind}: {text}); get it again"
        raise ValueError(f"model '{path}' {problem}") from error


def _stored_dtype(file: _File) -> torch.dtype:
    """Choose the dtype of the converted weights; refuse an unsupported quantization."""
    import gguf

    kinds = {tensor.tensor_type: tensor for tensor in file.tensors if len(tensor.shape) > 1}
    for kind, tensor in kinds.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except NotImplementedError as error:
            raise ValueError(
                f"model '{file.path}' is quantized as {kind.name}, which the package gguf cannot"
                " undo; get the model in another quantization, such as Q4_K_M"
            ) from error
    # Quantized weights become bfloat16; others keep their type.
    exact = {"F32": torch.float32, "F16": torch.float16}
    return exact.get("".join({kind.name for kind in kinds}), torch.bfloat16)


def _write(file: _File, folder: Path, source: dict[str, Any]) -> None:
    path, dtype = file.path, _stored_dtype(file)
    weights = sum(int(tensor.n_elements) for tensor in file.tensors) * dtype.itemsize
    cache, name = folder.parent, str(dtype).removeprefix("torch.")
    with temporary_folder(cache, ".converting-") as temporary:
        free = shutil.disk_usage(temporary).free
        if free < weights + _SPARE_BYTES:
            raise ValueError(
                f"'{cache}' has {free:,} bytes free and model '{path}' takes {weights:,} when"
                " converted; make room there, or set XDG_CACHE_HOME to another folder"
            )
        other = "twice that in float32" if dtype.itemsize == 2 else "half with --dtype bfloat16"
        write_remark(
            f"writing {format_bytes(weights)} of {name} weights to '{folder}'; they take that much"
            f" memory, {other}"
        )
        _convert(file, dtype, temporary)
        (temporary / RECORD).write_text(json.dumps(source), encoding="utf-8")
        if folder.is_dir() and not _is_current(folder):  # of an earlier version of this package
            shutil.rmtree(folder)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process wrote it first
                raise


def _convert(file: _File, dtype: torch.dtype, temporary: Path) -> None:
    from transformers.integrations.gguf import is_gguf_arch_supported

    path, fields = file.path, file.fields
    options: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}

    def load(kind: Any) -> Any:
        return _attempt(path, lambda: kind.from_pretrained(path.parent, **options))

    with lean_transformers():
        config = load(AutoConfig)
        check_model(config)
        tokenizer = load(AutoTokenizer)
    correct_tokenizer(tokenizer, fields)
    architecture = fields["general.architecture"]
    if not is_gguf_arch_supported(architecture):  # its layout is in the tables of `write_weights`
        model, missing = _attempt(
            path, lambda: write_weights(file.tensors, architecture, config, dtype, temporary)
        )
        model.config.dtype, model.config.architectures = dtype, [type(model).__name__]
        model.config.save_pretrained(temporary)
    else:
        if len(file.readers) > 1:
            raise ValueError(
                f"model '{path}' has {len(file.readers)} parts, which transformers does not read"
                f" for {architecture}; join them with llama-gguf-split --merge"
            )
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        options |= {"config": config, "dtype": dtype, "output_loading_info": True}
        # The progress bars of transformers are for a terminal only.
        bars = sys.stderr if sys.stderr.isatty() else io.StringIO()
        with contextlib.redirect_stderr(bars):
            model, info = load(AutoModelForCausalLM)
            missing = sorted(info["missing_keys"])
            model.save_pretrained(temporary)
    check_complete(str(path), missing)
    ends = model.generation_config
    before = ends.eos_token_id
    listed = before if isinstance(before, list) else [] if before is None else [before]
    ends.eos_token_id = [*dict.fromkeys([*listed, *metadata_ends(fields)])] or None
    add_end_tokens(ends, tokenizer, config.get_text_config().vocab_size)
    ends.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)


def check_complete(name: str, missing: list[str]) -> None:
    """Refuse a checkpoint that lacks weights; they would be initialized at random."""
    if missing:
        raise ValueError(
            f"model {name!r} is incomplete: {len(missing)} parameters are not in its weights"
            f" (the first is {min(missing)}); get the model again"
        )


# --- weights, one tensor at a time, with the names and layouts of transformers' reader, which keeps
# --- several copies of all of them

_NUMBERS_AT_ONCE = 4 << 20  # of a table
_TABLES = ("token_embd.weight", "output.weight")  # the largest tensors; no layout changes them
# Loading keeps an entire file in memory until its last tensor is copied.
_FILE_BYTES = 128 << 20


class CheckpointWriter:
    """Writes safetensors files, each once enough tensors have come for it, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []  # the names in each
        self._size = 0

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        self._tensors[name] = tensor.contiguous()
        self._size += tensor.nbytes
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= _FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        self._files.append([*self._tensors])
        save_file(self._tensors, self._folder / str(len(self._files)), {"format": "pt"})
        self._tensors.clear()

    def close(self) -> set[str]:
        """Give the files their names and write the index; return the names that were written."""
        if self._tensors:
            self._end_file()
        count, weight_map = len(self._files), dict[str, str]()
        for number, names in enumerate(self._files, 1):
            suffix = f"-{number:05}-of-{count:05}" if count > 1 else ""
            file = f"model{suffix}.safetensors"
            (self._folder / str(number)).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._size}, "weight_map": weight_map}
            write_json(self._folder / SAFE_WEIGHTS_INDEX_NAME, index)
        return {*weight_map}


def _read_table(tensor: Any, dtype: torch.dtype, progress: Progress) -> torch.Tensor:
    """Read a tensor of a GGUF file a few rows at a time."""
    from gguf import dequantize

    rows = max(1, _NUMBERS_AT_ONCE // tensor.data.shape[-1])
    table = torch.empty(len(tensor.data), int(tensor.shape[0]), dtype=dtype)
    for start in range(0, len(table), rows):
        chunk = tensor.data[start : start + rows]
        table[start : start + rows] = torch.tensor(dequantize(chunk, tensor.tensor_type))
        progress.advance(chunk.nbytes)
    return table


def write_weights(
    tensors_of_file: Sequence[Any],
    architecture: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    folder: Path,
) -> tuple[transformers.PreTrainedModel, list[str]]:
    """Write weights, without a config, as transformers would load them in `dtype`.

    Returns the model on the meta device, and the names of parameters that the file lacks.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as layouts

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    make = layouts.TENSOR_PROCESSORS.get(architecture, layouts.TensorProcessor)
    processor = make(config=config.to_dict())
    names = layouts.get_gguf_hf_weights_map(model, processor)
    # Tied parameters appear once.
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in names.values()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}  # a layer's experts, stacked
    context = {"tensor_key_mapping": names, "parsed_parameters": parsed}
    checkpoint = CheckpointWriter(folder)
    size = sum(int(tensor.n_bytes) for tensor in tensors_of_file)
    with Progress("converting", size, "bytes") as progress:

        def write(name: str, values: Any) -> None:
            if name not in shapes:  # a tied weight is written by its other name
                return
            if shapes[name] != tuple(values.shape):
                expected = [*shapes[name]]
                raise ValueError(f"{name} must have the shape {expected}, got {[*values.shape]}")
            tensor = torch.as_tensor(np.array(values) if isinstance(values, np.ndarray) else values)
            checkpoint.write(name, tensor.to(dtype))

        def write_joined() -> None:
            for name, tensor in parsed["tensors"].items():
                write(name, tensor)
            parsed["tensors"].clear()

        block = ""
        for tensor in sorted(tensors_of_file, key=lambda tensor: _block(tensor.name)):
            if _block(tensor.name) != block:
                write_joined()
                block = _block(tensor.name)
            name = names.get(tensor.name)
            if tensor.name in _TABLES and name in shapes:
                write(name, _read_table(tensor, dtype, progress))
                continue
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(values, name=tensor.name, **context)
            write(names.get(result.name, ""), result.weights)
            progress.advance(tensor.n_bytes)
        write_joined()
    written = checkpoint.close()
    return model, [name for name, _ in model.named_parameters() if name not in written]


def _block(name: str) -> str:
    """Return the layer prefix of a tensor's name, such as ``blk.3``; empty outside the layers."""
    return ".".join(name.split(".")[:2]) if name.startswith("blk.") else ""
