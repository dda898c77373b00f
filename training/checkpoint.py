"""Checkpoints, written atomically."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

FILE = "checkpoint.pt"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Optimizer steps done.
        tokens: Tokens trained on.
        window: Number of the next training window: the position in the data.
        seconds: Training time, over all starts of the run.
    """

    step: int = 0
    tokens: int = 0
    window: int = 0
    seconds: float = 0.0


def save(folder: Path, progress: Progress, **states: object) -> None:
    """Write the checkpoint of a run atomically.

    Args:
        folder: The folder of the run.
        progress: How far the run is.
        **states: State dicts and settings, kept by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / (FILE + ".part")
    with temporary.open("wb") as file:
        torch.save({"progress": asdict(progress), **states}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / FILE)


def load(folder: Path) -> tuple[Progress, dict]:
    """Read the checkpoint of a run.

    Args:
        folder: The folder of the run.

    Returns:
        How far the run is, and the states by name.

    Raises:
        FileNotFoundError: If there is no checkpoint.
    """
    states = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    return Progress(**states.pop("progress")), states


def exists(folder: Path) -> bool:
    """Tell whether the run has a checkpoint."""
    return (folder / FILE).exists()
