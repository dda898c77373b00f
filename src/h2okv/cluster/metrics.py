"""Metrics of all replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from h2okv.cluster.router import RelayCounts

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
    """Starts a board that lives until it is killed, as the application does."""
    return ray.remote(Board).options(num_cpus=0, lifetime="detached", max_restarts=-1).remote()


_SHARED = ("model", "row_budget", "max_context", "max_prompt_tokens")
"""What all copies say alike, and is not added up."""


def merge_metrics(texts: Mapping[str, str], counts: RelayCounts) -> bytes:
    """Puts pages together."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts, counts))
    return generate_latest(registry)


def merge_stats(stats: Iterable[Mapping[str, Any]], counts: RelayCounts) -> dict[str, Any]:
    """Adds up the numbers of `/stats`."""
    merged: dict[str, Any] = {"replicas": 0, "retried": counts.retried, "broken": counts.broken}
    for one in stats:
        merged["replicas"] += 1
        for name, value in one.items():
            if name in _SHARED or not isinstance(value, int | float):
                merged.setdefault(name, value)
            else:
                merged[name] = merged.get(name, 0) + value
    return merged


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str], counts: RelayCounts) -> None:
        self._texts, self._counts = texts, counts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    merged.add_sample(sample.name, labels, sample.value)
        yield from families.values()
        yield GaugeMetricFamily("h2okv_replicas", "Copies that answered.", value=len(self._texts))
        yield CounterMetricFamily(
            "h2okv_retried", "Requests given to another copy.", value=self._counts.retried
        )
        yield CounterMetricFamily(
            "h2okv_broken_streams",
            "Streams that ended with an error, because their copy was lost.",
            value=self._counts.broken,
        )

    def describe(self) -> Iterable[Metric]:
        """Names nothing in advance."""
        return []
