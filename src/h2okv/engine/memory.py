"""The memory of a machine and of this process."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

import torch

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_LARGE = 128 << 10
_TOP = 4 << 20
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MOST_KERNELS = 16
"""Of a decode step and of one micro-batch of prompts, with some to spare."""
_PROC = Path("/proc")
# Version 2 and version 1 of Linux's control groups, by which containers are limited.
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
_UNITS = {"": 1, "b": 1, **{u: 1000**n for n, u in enumerate(("kb", "mb", "gb", "tb"), 1)}}
_UNITS |= {u: 1024**n for n, u in enumerate(("kib", "mib", "gib", "tib"), 1)}


def parse_memory(text: str) -> int:
    """Reads an amount of memory.

    Args:
        text: Such as ``8GiB``, ``500MB`` or a plain number of bytes.

    Returns:
        Bytes.

    Raises:
        ValueError: If it is no such amount, or nothing.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"--memory {text!r} is no amount of memory; give one such as 8GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def available_bytes(device: torch.device) -> int | None:
    """Tells how much memory can still be taken on a device.

    Args:
        device: The CPU or a GPU.

    Returns:
        Bytes; ``None`` where the system does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    amounts = [_field("meminfo", "MemAvailable"), *map(_left, _LIMITS)]
    known = [amount for amount in amounts if amount is not None]
    return min(known) if known else None


def data_bytes() -> int | None:
    """Private memory that this process can write to, resident or not (what RLIMIT_DATA limits).

    Returns:
        Bytes; ``None`` on a system that does not tell.
    """
    return _field("self/status", "VmData")


def resident_bytes() -> int | None:
    """Resident memory of this process now; ``None`` on a system without ``/proc``."""
    return _field("self/status", "VmRSS")


def peak_resident_bytes() -> int | None:
    """The largest resident memory of this process since `reset_peak`, or since it began."""
    # Not ru_maxrss: a spawned process inherits its parent's there.
    return _field("self/status", "VmHWM")


def reset_peak() -> None:
    """Makes the present resident memory the largest so far, where Linux allows it."""
    try:
        (_PROC / "self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def give_memory_back() -> None:
    """Makes the libraries return what they no longer need, so that a promise can be kept.

    The C library would keep blocks of up to 32 MiB for later, in which others do not fit: after
    some prompts of different length a process holds twice what it uses. oneDNN, with which PyTorch
    multiplies bf16 on a CPU, keeps machine code for each shape of a product, 1 to 2 MiB each, and
    both it and PyTorch remember 1024 of them; here they keep few, unless the environment says
    otherwise. That holds for products after this call, if there were none in bf16 before.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_MOST_KERNELS))
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, _TOP)
        library.mallopt(_ARENA_MAX, 2)


def _field(file: str, name: str) -> int | None:
    """Reads a line ``name: number kB``."""
    try:
        lines = (_PROC / file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(values[0]) * 1024 if values else None


def _left(limit: tuple[Path, Path]) -> int | None:
    """What a control group still allows; ``None`` without a limit."""
    try:
        most, used = (path.read_text(encoding="ascii").strip() for path in limit)
        return max(0, int(most) - int(used))
    except (OSError, ValueError):
        return None
