"""Metrics of the server, in Prometheus' format."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from h2okv.engine.llm import AsyncLLM
from h2okv.engine.outputs import OutputDelta

_PREFIX = "h2okv_"
_WINDOW = 10
"""Seconds over which the present speed is averaged."""
_SECONDS: Mapping[str, tuple[Any, ...]] = {
    "request": (
        (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
        "From a request to the end of its answer.",
        ("endpoint",),
    ),
    "time_to_first_token": (
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
        "From a request to the first token of each of its prompts, waiting included.",
        (),
    ),
    "time_per_token": (
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
        "Mean time between the tokens of an output, after the first.",
        (),
    ),
}
"""Histograms: their buckets, help texts, and labels."""
_AGREEMENT = {
    "agreement": "Share of next tokens that are the full cache's, of answers read again.",
    "agreement_bound": "Lower bound of this share, of 95 %.",
}


class Metrics(Collector):
    """All metrics, in a separate registry; reads the engine's counters when it is collected."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine, self._tokens = engine, Tally[int]()  # new tokens by second
        self._registry = registry = CollectorRegistry()
        meaning, labels = "HTTP requests, by outcome.", ("endpoint", "outcome")
        self.requests = Counter(f"{_PREFIX}requests", meaning, labels, registry=registry)
        self.seconds = {
            name: Histogram(
                f"{_PREFIX}{name}_seconds", meaning, labels, buckets=buckets, registry=registry
            )
            for name, (buckets, meaning, labels) in _SECONDS.items()
        }
        meaning = "Tokens generated in a second, over the last ten."
        speed = Gauge(f"{_PREFIX}tokens_per_second", meaning, registry=registry)
        speed.set_function(self.tokens_per_second)
        healthy = Gauge(f"{_PREFIX}healthy", "1 while requests are taken.", registry=registry)
        healthy.set_function(lambda: engine.is_healthy)
        registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for counter in fields(stats):
            kind = CounterMetricFamily if counter.metadata["is_counter"] else GaugeMetricFamily
            meaning, value = counter.metadata["meaning"], getattr(stats, counter.name)
            yield kind(f"{_PREFIX}{counter.name}", meaning, value=value)
        for name, meaning in _AGREEMENT.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}{name}", meaning, labels=("budget", "kind"))
            for row in self._engine.agreement().rows:
                value = row.agreement if name == "agreement" else row.bound
                gauge.add_metric((row.budget, row.kind), value)
            yield gauge

    def add_tokens(self, count: int) -> None:
        self._tokens[int(time.monotonic())] += count
        self.tokens_per_second()

    def tokens_per_second(self) -> float:
        """Return the mean of the last ten seconds; forget earlier ones."""
        since = int(time.monotonic()) - _WINDOW
        for second in [second for second in self._tokens if second <= since]:
            del self._tokens[second]
        return self._tokens.total() / _WINDOW


class RequestMetrics:
    """Times and counts one HTTP request."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics, self._endpoint = metrics, endpoint
        self._start_time = time.monotonic()
        self._num_prompt = self._num_new = 0
        self.note = ""  # its outcome and counts, for the log
        # For each output: the time of its first token, and the number of tokens after it.
        self._outputs: dict[int, tuple[float, int]] = {}

    def take(self, delta: OutputDelta) -> None:
        now, num_new, seconds = time.monotonic(), len(delta.token_ids), self._metrics.seconds
        self._num_new += num_new
        self._metrics.add_tokens(num_new)
        if delta.prompt is not None:  # the first of a prompt
            self._num_prompt += len(delta.prompt.token_ids)
            if num_new:
                seconds["time_to_first_token"].observe(now - self._start_time)
        first, later = self._outputs.get(delta.index, (now, -1))
        self._outputs[delta.index] = first, later + num_new
        if delta.finish_reason is not None and later + num_new > 0:
            seconds["time_per_token"].observe((now - first) / (later + num_new))

    def close(self, outcome: str) -> None:
        """Count the request by its outcome."""
        self.note = f" {outcome} {self._num_prompt} prompt tokens, {self._num_new} new"
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        seconds = time.monotonic() - self._start_time
        self._metrics.seconds["request"].labels(self._endpoint).observe(seconds)
