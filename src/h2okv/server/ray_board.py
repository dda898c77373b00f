"""Where replicas leave their numbers, for whoever asks the front.

A replica whose rows are all taken answers no further call, so it is not asked: it tells.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import ray

_STALE = 6.0
"""Seconds after which a replica that tells nothing is counted as gone."""


class Numbers(NamedTuple):
    """What a replica tells of itself.

    Attributes:
        replica: Its name.
        stats: Its ``/stats``.
        metrics: Its ``/metrics``, in Prometheus' text form.
    """

    replica: str
    stats: dict[str, Any]
    metrics: str


class Board:
    """A Ray actor that keeps the newest numbers of each replica."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, Numbers]] = {}

    def put(self, numbers: Numbers) -> None:
        """Takes a replica's numbers."""
        self._newest[numbers.replica] = time.monotonic(), numbers

    def get(self) -> list[Numbers]:
        """Gives those of the replicas that live."""
        now = time.monotonic()
        self._newest = {
            name: entry for name, entry in self._newest.items() if now - entry[0] < _STALE
        }
        return [numbers for _, numbers in self._newest.values()]


def make_board() -> Any:
    """Starts a board that lives until it is killed, as the application does.

    Returns:
        The actor's handle.
    """
    return ray.remote(Board).options(num_cpus=0, lifetime="detached", max_restarts=-1).remote()
