"""Where a benchmark runs, and on which code."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch
import transformers

import h2okv
from h2okv.provenance import commit

ENVIRONMENT_COLUMNS = (
    "date", "version", "commit", "machine", "device", "python", "torch", "transformers", "threads",
)  # fmt: skip
"""The names of what `environment` tells."""


def environment(device: torch.device) -> dict[str, str]:
    """Describes the machine and the software.

    Args:
        device: Where the model runs.

    Returns:
        A text for each of `ENVIRONMENT_COLUMNS`; ``commit`` is empty without a checkout, and ends
        in ``+`` if the code differs from that commit.
    """
    is_gpu = device.type == "cuda"
    values = (
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        h2okv.__version__,
        commit(),
        _processor(),
        torch.cuda.get_device_name(device) if is_gpu else device.type,
        platform.python_version(),
        torch.__version__,
        transformers.__version__,
        str(torch.get_num_threads()),
    )
    return dict(zip(ENVIRONMENT_COLUMNS, values, strict=True))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
