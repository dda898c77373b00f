"""GGUF files are converted once to ordinary checkpoints, in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from h2okv.cache.support import check_model
from h2okv.console import format_bytes, optional, write_remark
from h2okv.integration.end_tokens import add_end_tokens
from h2okv.integration.gguf_reader import lean_transformers, open_lean
from h2okv.integration.gguf_tokenizer import check_split, correct_tokenizer, metadata_ends
from h2okv.integration.gguf_weights import write_weights
from h2okv.integration.names import cache_folder, check_gguf, gguf_parts
from h2okv.records import first_line, parse_json, refusing

RECORD = "converted_from.json"  # in a converted folder: the file that it was converted from
_VERSION = 2  # of what is written; folders of another are written anew
_DAY = 86400.0
_SPARE_BYTES = 64 << 20
_SCALING = ("rope.scaling.type", "rope.scaling.factor")
_SCALING_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight")


def converted(path: Path) -> Path:
    """Return the checkpoint converted from a GGUF file, now if it has not been converted before.

    Says on stderr what is converted, where to and how large.
    """
    parts = gguf_parts(path.absolute())
    path = parts[0]
    stats = [_attempt(path, part.stat) for part in parts]
    size, changed = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
    source = {"file": str(path), "bytes": size, "changed": changed, "version": _VERSION}
    for folder, record in converted_folders():
        if record == source:  # spares reading all of a large file at each start
            return folder
    write_remark(f"converting '{path}' ({format_bytes(size)}), once: reading what it holds")
    file = _open(parts)
    digest = _attempt(path, lambda: sha256(*parts))
    folder = cache_folder("models") / f"{path.stem}-{digest[:16]}"
    if not _is_current(folder):
        begun = time.perf_counter()
        _write(file, folder, source)
        write_remark(f"converted in {time.perf_counter() - begun:.0f} s")
    return folder


def converted_folders() -> Iterator[tuple[Path, dict[str, Any]]]:
    """List what has been converted, with the record of each."""
    # Not the hidden folders, which another process is still writing.
    for file in sorted(cache_folder("models").glob(f"[!.]*/{RECORD}")):
        with contextlib.suppress(OSError, ValueError):
            yield file.parent, parse_json(file.read_text(encoding="utf-8"))


def _is_current(folder: Path) -> bool:
    return any(
        own == folder and record.get("version") == _VERSION for own, record in converted_folders()
    )


def sha256(*paths: Path) -> str:
    """Return the digest of a file, or of several as one, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)  # which goes on with it
    return digest.hexdigest()


@contextlib.contextmanager
def made_in(cache: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary folder in the cache, for what is moved to its place once complete."""
    room = "make room there, or set XDG_CACHE_HOME to another folder"
    with refusing(f"'{cache}' cannot be written", room, OSError, SafetensorError):
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(f"{prefix}*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=cache, ignore_cleanup_errors=True
        ) as made:
            yield Path(made)


@dataclass(frozen=True)
class _File:
    """A GGUF model: its files, opened, and what they say."""

    path: Path  # the first of them, by which messages name it
    readers: Sequence[Any]

    @property
    def tensors(self) -> list[Any]:
        return [tensor for reader in self.readers for tensor in reader.tensors]

    @property
    def fields(self) -> dict[str, Any]:
        """Its metadata; of a list the length."""
        fields = self.readers[0].fields.items()
        return {
            key: len(own.data) if own.types[0].name == "ARRAY" else own.contents()
            for key, own in fields
        }


def _open(parts: Sequence[Path]) -> _File:
    """Open a GGUF model; refuse one of another format, incomplete, or that is not understood."""
    path = parts[0]
    for part in parts:
        check_gguf(part)
    for name in ("gguf", "accelerate"):
        optional(name, f"--model '{path}'", "gguf")
    file = _File(path, [_attempt(part, partial(open_lean, part)) for part in parts])
    fields = file.fields
    count = fields.get("split.count", 1)
    if count != len(parts):
        raise ValueError(
            f"--model '{path}' is part {fields.get('split.no', 0) + 1} of {count} of a model, but"
            f" its name does not say so; name all parts as they were named, ending in"
            f" -00001-of-{count:05}.gguf, in one folder"
        )
    try:
        doubt = check_split(fields)
    except ValueError as error:
        raise ValueError(f"--model '{path}' {error}") from error
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
    """Run a reader that fails in as many ways as a file can be damaged."""
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
        raise ValueError(f"--model '{path}' {problem}") from error


def _stored_dtype(file: _File) -> torch.dtype:
    """Choose the type of the converted weights; refuse a quantization that cannot be undone."""
    import gguf

    kinds = {tensor.tensor_type: tensor for tensor in file.tensors if len(tensor.shape) > 1}
    for kind, tensor in kinds.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except NotImplementedError as error:
            raise ValueError(
                f"--model '{file.path}' is quantized as {kind.name}, which the package gguf cannot"
                " undo; get the model in another quantization, such as Q4_K_M"
            ) from error
    # Quantized weights become bfloat16; others keep their type.
    exact = {"F32": torch.float32, "F16": torch.float16}
    return exact.get("".join({kind.name for kind in kinds}), torch.bfloat16)


def _write(file: _File, folder: Path, source: dict[str, Any]) -> None:
    path, dtype = file.path, _stored_dtype(file)
    weights = sum(int(tensor.n_elements) for tensor in file.tensors) * dtype.itemsize
    joined = source["bytes"] if len(file.readers) > 1 else 0
    cache, name = folder.parent, str(dtype).removeprefix("torch.")
    with made_in(cache, ".converting-") as made:
        free = shutil.disk_usage(made).free
        if free < weights + joined + _SPARE_BYTES:
            raise ValueError(
                f"'{cache}' has {free:,} bytes free and --model '{path}' takes"
                f" {weights + joined:,} when converted; make room there, or set XDG_CACHE_HOME to"
                " another folder"
            )
        other = "twice that in float32" if dtype.itemsize == 2 else "half with --dtype bfloat16"
        write_remark(
            f"writing {format_bytes(weights)} of {name} weights to '{folder}'; they take that much"
            f" memory, {other}"
        )
        if joined:
            with made_in(cache, ".joining-") as place:
                whole = place / f"{path.stem}.gguf"
                _join(file, whole)
                _convert(path, whole, open_lean(whole), dtype, made)
        else:
            _convert(path, path, file.readers[0], dtype, made)
        (made / RECORD).write_text(json.dumps(source), encoding="utf-8")
        if folder.is_dir() and not _is_current(folder):  # of an earlier version of this package
            shutil.rmtree(folder)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise


def _join(file: _File, path: Path) -> None:
    """Write the parts of a split model as one file, which is all that transformers reads."""
    import gguf

    first = gguf.GGUFReader(file.path).fields
    writer = gguf.GGUFWriter(path, first["general.architecture"].contents())
    # The writer has these itself, and tensors stand where its own alignment puts them.
    own = ("general.architecture", "general.alignment")
    for key, field in first.items():
        if key not in own and not key.startswith(("GGUF.", "split.")) and len(field.data):
            is_list = field.types[0].name == "ARRAY"
            listed = field.types[-1] if is_list else None
            writer.add_key_value(key, field.contents(), field.types[0], listed)
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _convert(path: Path, whole: Path, reader: Any, dtype: torch.dtype, made: Path) -> None:
    """Convert one file; `path` is what messages call it."""
    given: dict[str, Any] = {"gguf_file": whole.name, "trust_remote_code": False}

    def load(kind: Any) -> Any:
        return _attempt(path, lambda: kind.from_pretrained(whole.parent, **given))

    fields = _File(path, [reader]).fields
    with lean_transformers():
        config = load(AutoConfig)
        check_model(config)
        tokenizer = load(AutoTokenizer)
    correct_tokenizer(tokenizer, fields)
    architecture = fields["general.architecture"]
    if _has_layout(architecture):
        model, missing = _attempt(
            path, lambda: write_weights(reader, architecture, config, dtype, made)
        )
        model.config.dtype, model.config.architectures = dtype, [type(model).__name__]
        model.config.save_pretrained(made)
    else:
        if hasattr(transformers, "GgufConfig"):  # earlier releases always dequantize
            given["quantization_config"] = transformers.GgufConfig(dequantize=True)
        given |= {"config": config, "dtype": dtype, "output_loading_info": True}
        # The progress bars of transformers are for a terminal only.
        bars = sys.stderr if sys.stderr.isatty() else io.StringIO()
        with contextlib.redirect_stderr(bars):
            model, info = load(AutoModelForCausalLM)
            missing = sorted(info["missing_keys"])
            model.save_pretrained(made)
    check_complete(str(path), missing)
    ends = model.generation_config
    before = ends.eos_token_id
    listed = before if isinstance(before, list) else [] if before is None else [before]
    ends.eos_token_id = [*dict.fromkeys([*listed, *metadata_ends(fields)])] or None
    add_end_tokens(ends, tokenizer, config.get_text_config().vocab_size)
    ends.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _has_layout(architecture: str) -> bool:
    """Whether transformers reads an architecture by names and layouts that can be had singly."""
    try:
        from transformers.integrations.gguf import is_gguf_arch_supported
    except ImportError:  # earlier releases have the one way only
        return True
    return not is_gguf_arch_supported(architecture)


def check_complete(name: str, missing: list[str]) -> None:
    """Refuse a checkpoint that lacks weights, which would be random numbers."""
    if missing:
        raise ValueError(
            f"--model {name!r} is incomplete: {len(missing)} parameters are not in its weights"
            f" (the first is {min(missing)}); get the model again"
        )
