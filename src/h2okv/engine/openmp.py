"""OpenMP's worker threads, which PyTorch computes with on a CPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_LIBRARY = re.compile(r"(/\S*lib(?:gomp|iomp5|omp)[-.\w]*)$", re.MULTILINE)
_SOFT = 1


def release_workers() -> bool:
    """Ends the workers that the calling thread holds; they come back when they are needed.

    Every thread that computes has workers of its own. If together they are more than there are
    processors, GNU's OpenMP lets all of them sleep between two operations instead of waiting
    awake, and waking up takes longer than most operations of a decode step: a model that was loaded
    in one thread and runs in another took 1.5 times as long for a token (two cores, 32 rows of the
    bundled model).

    Returns:
        Whether there was an OpenMP library that did it (``omp_pause_resource_all``, OpenMP 5.0).
    """
    try:
        found = _LIBRARY.search(_MAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return False
    if found is None:
        return False
    try:
        pause = ctypes.CDLL(found[1]).omp_pause_resource_all
    except (OSError, AttributeError):
        return False
    return int(pause(_SOFT)) == 0
