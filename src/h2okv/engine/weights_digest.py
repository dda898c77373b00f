"""A short name for a checkpoint's weights, by which a resumed job knows them again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

_KINDS = ("*.safetensors", "*.bin")
_SAMPLES = 64
_SAMPLE = 4096
"""Bytes read at each of so many places of a file; another training changes all of them."""


def weights_digest(config: PreTrainedConfig) -> str | None:
    """Names the weights that belong to a config.

    Args:
        config: As it was loaded, from a folder or the Hub.

    Returns:
        The commit on the Hub, or a digest of samples of the folder's files; ``None`` if neither is
        known.

    Raises:
        ValueError: If a file cannot be read.
    """
    folder = Path(config.name_or_path or "")
    if not config.name_or_path or not folder.is_dir():
        commit: Any = getattr(config, "_commit_hash", None)
        return commit
    digest = hashlib.sha256()
    for path in sorted(path for kind in _KINDS for path in folder.glob(kind)):
        try:
            _add_file(digest, path)
        except OSError as error:
            raise ValueError(
                f"'{path}' cannot be read ({error.strerror}); get the model again"
            ) from error
    return digest.hexdigest()[:16]


def _add_file(digest: Any, path: Path) -> None:
    """Adds a file's name, size and samples; mutates the digest."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{path.name} {size} ".encode())
        for index in range(_SAMPLES):
            file.seek(index * size // _SAMPLES)
            digest.update(file.read(_SAMPLE))
