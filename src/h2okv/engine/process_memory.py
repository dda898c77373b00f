"""The data of this process, which a promise about memory is about."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_LARGE = 1 << 20


def data_bytes() -> int | None:
    """Private memory that this process can write to, resident or not (what RLIMIT_DATA limits).

    Returns:
        Bytes; ``None`` on a system that does not tell.
    """
    return _field("VmData")


def peak_resident_bytes() -> int | None:
    """The largest resident memory of this process so far; ``None`` where nobody tells."""
    return _field("VmHWM")


def give_memory_back() -> None:
    """Makes the C library return large blocks to the system as soon as they are freed.

    It would keep blocks of up to 32 MiB for later, in which others do not fit: after some prompts
    of different length a process holds twice what it uses.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, 4 * _LARGE)
        library.mallopt(_ARENA_MAX, 2)


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(values[0]) * 1024 if values else None
