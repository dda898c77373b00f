"""Jobs and servers on a Ray cluster, which is joined, or started on this machine."""

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
    # No usage reports unless the user enabled them.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Keep C++ logs in Ray's log files: stderr is for this command.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    return optional("ray", "--ray", "ray")


@contextmanager
def cluster() -> Iterator[ModuleType]:
    """Join the cluster of RAY_ADDRESS or of this machine; else start one, and end it on exit."""
    ray = import_ray()
    # Ray prints about every actor that ends; its log files have that too.
    with open(os.devnull, "w") as devnull, redirect_stdout(devnull):
        if ray.is_initialized():
            yield ray
            return
        # Hide a line that Ray's C++ code prints when its log level is lowered.
        sys.stderr.flush()
        saved_stderr = os.dup(2)
        try:
            os.dup2(devnull.fileno(), 2)
            ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            address = os.environ.get("RAY_ADDRESS")
            where = f"the cluster at RAY_ADDRESS={address}" if address else "a Ray cluster"
            message = f"{where} cannot be joined or started ({first_line(error)})"
            raise ValueError(f"{message}; check `ray status`") from error
        finally:
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
        try:
            yield ray
        finally:
            ray.shutdown()


def place_copies(ray: Any, device: str, copies: int | None) -> tuple[int, dict[str, float]]:
    """Return the number of copies (``None``: one a GPU or machine) and each one's resources."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sum(int(machine.get("GPU", 0)) for machine in machines)
    if device == "cuda" or (device == "auto" and gpus):
        return copies or max(1, gpus), {"num_cpus": 1, "num_gpus": 1}
    copies = copies or max(1, len(machines))
    cpus = [int(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]
    share = min(cpus) / -(-copies // len(cpus)) if cpus else 1.0
    return copies, {"num_cpus": int(share) if share >= 1 else share, "num_gpus": 0}


def reason(error: BaseException) -> str:
    """Return the message of an error on another machine, without Ray's report around it."""
    messages = _RAISED.findall(str(error))
    return messages[-1][:500].rstrip(".") if messages else first_line(error)
