"""Python threads, one to a core, whose operations have one thread each.

PyTorch's own threads share each operation and wait for one another after it: two of them do a
prompt's tiles hardly faster than one. Tiles that know nothing of one another need not wait.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def run_apart(jobs: list[Callable[[], None]]) -> None:
    """Run jobs without gradients, as many at a time as PyTorch has threads; waits for all.

    What they compute must not depend on their order. PyTorch's own threads stay awake for some
    milliseconds after an operation and take the cores from these: not for short jobs.
    """
    is_inference = torch.is_inference_mode_enabled()

    def run(job: Callable[[], None]) -> None:
        with torch.inference_mode(is_inference), torch.no_grad():
            job()

    list(_pool(torch.get_num_threads()).map(run, jobs))


@functools.lru_cache(maxsize=1)
def _pool(count: int) -> ThreadPoolExecutor:
    """Return a pool of threads, each with one thread for its operations."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="h2okv-tiles")
    all_here = threading.Barrier(count)

    def limit(_: int) -> None:
        torch.get_num_threads()  # gives a new thread the process's number, in place of a later one
        torch.set_num_threads(1)
        all_here.wait()  # so that each thread runs this once

    list(pool.map(limit, range(count)))
    torch.set_num_threads(count)  # threads to come shall have what they had before
    return pool


if hasattr(os, "register_at_fork"):  # threads stay behind in the parent
    os.register_at_fork(after_in_child=_pool.cache_clear)
