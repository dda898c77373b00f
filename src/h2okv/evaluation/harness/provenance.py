"""What a run was made with, so that its figures can be made again."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from transformers import PreTrainedModel

import h2okv.provenance
from h2okv.cache.fingerprint import fingerprint
from h2okv.evaluation.harness.settings import EvictionSettings

_PACKAGES = ("tokenizers", "lm_eval", "crfm-helm")


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
    versions = {"python": platform.python_version()} | h2okv.provenance.versions()
    commit = versions.pop("commit")
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "model": name,
        "revision": getattr(model.config, "_commit_hash", None) or "",
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache": settings.describe(),
        "versions": versions,
        "commit": commit,
    }
