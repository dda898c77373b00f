"""A model's files: where they are, and whether what they hold can be used."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def locate(name: str) -> str:
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


def check_complete(name: str, missing: list[str]) -> None:
    """Refuses a checkpoint that lacks weights, which would be random numbers."""
    if missing:
        raise ValueError(
            f"--model {name!r} is incomplete: {len(missing)} parameters are not in its weights"
            f" (the first is {min(missing)}); get the model again"
        )


def check_finite(name: str, model: torch.nn.Module) -> None:
    """Refuses weights that are not numbers, which would give any text at all."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for tensor_name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"--model {name!r} has NaN or infinity in {tensor_name}; its weights are damaged"
                " or do not fit the data type, so get it again or try --dtype float32"
            )
