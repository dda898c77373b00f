"""What the server counts, in Prometheus' form."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from h2okv.engine.outputs import OutputDelta

if TYPE_CHECKING:
    from h2okv.engine.llm import AsyncLLM

_PREFIX = "h2okv_"
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_WINDOW = 10
"""Seconds that the present speed is taken over."""


class Metrics(Collector):
    """All that ``/metrics`` tells, in a registry of its own; asks the engine for its numbers."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        # How many tokens were made in each of the last seconds.
        self._tokens: deque[tuple[int, int]] = deque()
        self._registry = registry = CollectorRegistry()
        requests = "HTTP requests, by what became of them."
        labels = ("endpoint", "outcome")
        self.requests = Counter(f"{_PREFIX}requests", requests, labels, registry=registry)

        def seconds(name: str, what: str, *labels: str, buckets: Sequence[float]) -> Histogram:
            name = f"{_PREFIX}{name}_seconds"
            return Histogram(name, what, labels, buckets=buckets, registry=registry)

        request = "From a request to the end of its answer."
        self.request_seconds = seconds("request", request, "endpoint", buckets=_REQUEST_BUCKETS)
        first = "From a request to the first token of each of its prompts, waiting included."
        self.first_token_seconds = seconds(
            "time_to_first_token", first, buckets=_FIRST_TOKEN_BUCKETS
        )
        token = "Mean time between the tokens of an output, after the first."
        self.token_seconds = seconds("time_per_token", token, buckets=_TOKEN_BUCKETS)
        registry.register(self)

    def text(self) -> bytes:
        """All numbers in Prometheus' text form."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for one in fields(stats):
            kind = CounterMetricFamily if one.metadata["is_counter"] else GaugeMetricFamily
            name, value = f"{_PREFIX}{one.name}", getattr(stats, one.name)
            yield kind(name, one.metadata["meaning"], value=value)
        yield GaugeMetricFamily(
            f"{_PREFIX}tokens_per_second",
            "Tokens generated in a second, over the last ten.",
            value=self.tokens_per_second(),
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}healthy", "1 while requests are taken.", value=int(self._engine.is_healthy)
        )

    def describe(self) -> Iterable[Metric]:
        """Names nothing in advance, so that registering asks the engine nothing."""
        return []

    def add_tokens(self, count: int) -> None:
        """Notes tokens that were made just now."""
        second = int(time.monotonic())
        if self._tokens and self._tokens[-1][0] == second:
            count += self._tokens.pop()[1]
        self._tokens.append((second, count))
        self.tokens_per_second()

    def tokens_per_second(self) -> float:
        """The mean of the last ten seconds; forgets what was before."""
        since = int(time.monotonic()) - _WINDOW
        while self._tokens and self._tokens[0][0] <= since:
            self._tokens.popleft()
        return sum(count for _, count in self._tokens) / _WINDOW


class RequestMetrics:
    """Times and counts one HTTP request."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics, self._endpoint = metrics, endpoint
        self._begin = time.monotonic()
        self._num_prompt = self._num_new = 0
        self.note = ""  # what became of it, for the log
        self._read: set[int] = set()
        # For each output: when its first token came, and how many came after that.
        self._outputs: dict[int, tuple[float, int]] = {}

    def take(self, delta: OutputDelta, prompt: int) -> None:
        """Notes what has just come for one of the prompts."""
        now, metrics = time.monotonic(), self._metrics
        self._num_new += len(delta.token_ids)
        if delta.prompt is not None:
            self._num_prompt += len(delta.prompt.token_ids)
        if delta.token_ids:
            metrics.add_tokens(len(delta.token_ids))
            if prompt not in self._read:
                self._read.add(prompt)
                metrics.first_token_seconds.observe(now - self._begin)
            first, later = self._outputs.get(delta.index, (now, -1))
            self._outputs[delta.index] = first, later + len(delta.token_ids)
        if delta.finish_reason is not None:
            first, later = self._outputs.get(delta.index, (now, 0))
            if later > 0:
                metrics.token_seconds.observe((now - first) / later)

    def close(self, outcome: str) -> None:
        """Counts the request by what became of it."""
        self.note = f" {outcome} {self._num_prompt} prompt tokens, {self._num_new} new"
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        seconds = time.monotonic() - self._begin
        self._metrics.request_seconds.labels(self._endpoint).observe(seconds)
