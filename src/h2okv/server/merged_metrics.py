"""The numbers of several copies of a server as one page in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from h2okv.server.relay import RelayCounts

_SHARED = ("model", "row_budget", "max_context", "max_prompt_tokens")
"""What all copies say alike, and is not added up."""


def merge_metrics(texts: Mapping[str, str], counts: RelayCounts) -> bytes:
    """Puts pages together.

    Args:
        texts: The page of each copy, by a name that becomes the label ``replica``.
        counts: What became of requests on their way to the copies.

    Returns:
        One page.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(texts, counts))
    return generate_latest(registry)


def merge_stats(stats: Iterable[Mapping[str, Any]], counts: RelayCounts) -> dict[str, Any]:
    """Adds up the numbers of `/stats`.

    Args:
        stats: Of each copy.
        counts: What became of requests on their way to the copies.

    Returns:
        The sums, with the number of copies.
    """
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
