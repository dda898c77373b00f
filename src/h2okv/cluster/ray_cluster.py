"""A Ray cluster: joined, or started on this machine."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

from h2okv.console import optional
from h2okv.records import first_line

_RAISED = re.compile(r"^[\w.]*(?:Error|Exception): (.+)$", re.MULTILINE)


def import_ray() -> Any:
    """Import Ray."""
    # Nothing is reported to anyone unless the user has said so.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What its C++ parts have to say stands in its log files; stderr is the command's.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    return optional("ray", "--ray", "ray")


@contextmanager
def cluster() -> Iterator[ModuleType]:
    """Join the cluster of RAY_ADDRESS or of this machine; without one, starts and ends one."""
    ray = import_ray()
    # Ray tells at length of every actor that ends; its log files have that too.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        if ray.is_initialized():
            yield ray
            return
        # Keeps a line away that Ray's C++ parts write when they are told to write less.
        sys.stderr.flush()
        kept = os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 2)
            ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            address = os.environ.get("RAY_ADDRESS")
            where = f"the cluster at RAY_ADDRESS={address}" if address else "a Ray cluster"
            told = f"{where} cannot be joined or started ({first_line(error)})"
            raise ValueError(f"{told}; check `ray status`") from error
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        try:
            yield ray
        finally:
            ray.shutdown()


def place_copies(ray: Any, device: str, copies: int | None) -> tuple[int, dict[str, float]]:
    """How many copies a cluster runs (``None``: one a GPU or machine), and what each takes."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sum(int(machine.get("GPU", 0)) for machine in machines)
    if device == "cuda" or (device == "auto" and gpus):
        return copies or max(1, gpus), {"num_cpus": 1, "num_gpus": 1}
    copies = copies or max(1, len(machines))
    cpus = [int(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]
    share = min(cpus) / -(-copies // len(cpus)) if cpus else 1.0
    return copies, {"num_cpus": int(share) if share >= 1 else share, "num_gpus": 0}


def reason(error: BaseException) -> str:
    """What went wrong on another machine, without Ray's report around it."""
    found = _RAISED.findall(str(error))
    return found[-1][:500].rstrip(".") if found else first_line(error)
