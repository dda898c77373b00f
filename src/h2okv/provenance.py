"""Which code computed a result: versions, and the commit of a checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import torch
import transformers

import h2okv


def versions() -> dict[str, str]:
    """Tells which code runs.

    Returns:
        The versions of h2okv, torch and transformers, and `commit`.
    """
    return {
        "h2okv": h2okv.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


@cache
def commit() -> str:
    """Names the commit that the package runs from.

    Returns:
        Its short name, with a ``+`` if the code differs from it; empty without a checkout.
    """
    package = Path(h2okv.__file__).parent
    if not (package.parent.parent / ".git").exists():
        return ""

    def git(*args: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *args], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    return name + ("+" if name and git("status", "--porcelain", "--", "*.py") else "")
