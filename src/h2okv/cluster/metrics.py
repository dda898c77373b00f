"""Metrics of all replicas, put together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from h2okv.cluster.router import Router

_SHARED = ("model", "max_budget", "max_context", "max_prompt_tokens")
"""What is the same of all replicas, and is not added up."""
_STALE = 6.0
"""Seconds after which a replica that tells nothing is counted as gone."""


class ReplicaNumbers(NamedTuple):
    """A replica's name, its ``/stats``, and the text of its ``/metrics``."""

    replica: str
    stats: dict[str, Any]
    metrics: str


class Board:
    """A Ray actor with the newest numbers of each replica.

    Replicas tell theirs while Serve checks their health: whoever asked them would wait for a row.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, ReplicaNumbers]] = {}

    def put(self, numbers: ReplicaNumbers) -> None:
        """Takes a replica's numbers."""
        self._newest[numbers.replica] = time.monotonic(), numbers

    def get(self) -> list[ReplicaNumbers]:
        """The numbers of the replicas that live."""
        since = time.monotonic() - _STALE
        self._newest = {name: entry for name, entry in self._newest.items() if entry[0] > since}
        return [numbers for _, numbers in self._newest.values()]


def merge_stats(numbers: Iterable[ReplicaNumbers], router: Router) -> dict[str, Any]:
    """Adds up the numbers of ``/stats``."""
    merged: dict[str, Any] = {"replicas": 0, "retried": router.retried, "broken": router.broken}
    for one in numbers:
        merged["replicas"] += 1
        for name, value in one.stats.items():
            if name in _SHARED or not isinstance(value, int | float):
                merged.setdefault(name, value)
            else:
                merged[name] = merged.get(name, 0) + value
    return merged


def merge_metrics(numbers: Sequence[ReplicaNumbers], router: Router) -> bytes:
    """One page of ``/metrics``, on which each sample has the name of its replica."""
    registry = CollectorRegistry()
    registry.register(_Merged(numbers, router))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, numbers: Sequence[ReplicaNumbers], router: Router) -> None:
        self._numbers, self._router = numbers, router

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for one in self._numbers:
            for family in text_string_to_metric_families(one.metrics):
                empty = Metric(family.name, family.documentation, family.type)
                merged = families.setdefault(family.name, empty)
                for sample in family.samples:
                    labels = {**sample.labels, "replica": one.replica}
                    merged.add_sample(sample.name, labels, sample.value)
        yield from families.values()
        count, router = len(self._numbers), self._router
        yield GaugeMetricFamily("h2okv_replicas", "Copies that answered.", value=count)
        yield CounterMetricFamily(
            "h2okv_retried", "Requests given to another copy.", value=router.retried
        )
        yield CounterMetricFamily(
            "h2okv_broken_streams",
            "Streams that ended with an error, because their copy was lost.",
            value=router.broken,
        )

    def describe(self) -> Iterable[Metric]:
        """Names nothing in advance."""
        return []
