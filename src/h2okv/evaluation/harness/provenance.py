"""What a run was made with, so that its figures can be made again."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import h2okv
from h2okv.cache.fingerprint import fingerprint
from h2okv.evaluation.harness.settings import EvictionSettings

_PACKAGES = ("h2okv", "torch", "transformers", "tokenizers", "lm_eval", "crfm-helm")


def provenance(model: PreTrainedModel, name: str, settings: EvictionSettings) -> dict[str, Any]:
    """Describes model, cache and software of a run.

    Args:
        model: the loaded model.
        name: how the user called it.
        settings: the cache.

    Returns:
        Values for JSON: ``model``, ``revision`` (the Hub's commit; empty for a folder),
        ``weights`` (a fingerprint), ``dtype``, the ``cache``'s settings, ``versions``, and
        ``commit`` (empty without a checkout; ``+`` at its end where the code differs from it).
    """
    return {
        "model": name,
        "revision": getattr(model.config, "_commit_hash", None) or "",
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache": settings.describe(),
        "versions": versions(),
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of what computes the figures, Python among them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"h2okv": h2okv.__version__, "torch": torch.__version__}


def commit() -> str:
    """Returns the commit of the checkout that the package runs from, or an empty text."""
    package = Path(h2okv.__file__).parent
    if not (package.parent.parent / ".git").exists():
        return ""
    found = _git(package, "rev-parse", "--short", "HEAD")
    return found + ("+" if found and _git(package, "status", "--porcelain", "--", "*.py") else "")


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
