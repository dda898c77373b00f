"""What the server counts, in Prometheus' form."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
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

_GAUGES = {
    "max_num_seqs": "Sequences that can decode at the same time.",
    "running": "Sequences that decode.",
    "waiting": "Requests that have not begun.",
    "cache_bytes": "Bytes of the cache entries that are held now.",
    "full_bytes": "Bytes that a full cache would hold for the same tokens.",
    "reserved_bytes": "Bytes of all slots, in use or not.",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were read, without reused ones.",
    "reused_tokens": "Tokens of prompts that came from a saved prefix.",
    "new_tokens": "Tokens that were generated.",
    "finished": "Requests to the engine that ended well.",
    "failed": "Requests to the engine that ended with an error.",
    "aborted": "Requests to the engine whose client went away.",
    "steps": "Decode steps.",
    "evictions": "Entries evicted, of one layer and one KV head.",
}


class Metrics(Collector):
    """All that ``/metrics`` tells, in a registry of its own; the engine's numbers when asked for.

    Attributes:
        requests: Counter of HTTP requests by endpoint and outcome.
        request_seconds: Histogram of their time, by endpoint.
        first_token_seconds: Histogram of the time from a request to the first token of a prompt.
        token_seconds: Histogram of the mean time between tokens of an output.
        speed: Tokens of the last seconds.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine, self.speed = engine, RecentSpeed()
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            f"{_PREFIX}requests",
            "HTTP requests, by what became of them.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "From a request to the end of its answer.",
            ["endpoint"],
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            f"{_PREFIX}time_to_first_token_seconds",
            "From a request to the first token of each of its prompts, waiting included.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            f"{_PREFIX}time_per_token_seconds",
            "Mean time between the tokens of an output, after the first.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        registry.register(self)

    def text(self) -> bytes:
        """All numbers in Prometheus' text form."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """The engine's own numbers."""
        stats = self._engine.stats()
        for name, meaning in _GAUGES.items():
            yield GaugeMetricFamily(f"{_PREFIX}{name}", meaning, value=getattr(stats, name))
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}{name}", meaning, value=getattr(stats, name))
        yield GaugeMetricFamily(
            f"{_PREFIX}tokens_per_second",
            "Tokens generated in a second, over the last ten.",
            value=self.speed.per_second(),
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}healthy", "1 while requests are taken.", value=int(self._engine.is_healthy)
        )

    def describe(self) -> Iterable[Metric]:
        """Names nothing in advance, so that registering asks the engine nothing."""
        return []


class RecentSpeed:
    """Tokens in the last seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()

    def add(self, tokens: int) -> None:
        """Notes tokens that were made just now."""
        second = int(time.monotonic())
        if self._seconds and self._seconds[-1][0] == second:
            tokens += self._seconds.pop()[1]
        self._seconds.append((second, tokens))
        self._forget(second)

    def per_second(self) -> float:
        """The mean of the last ten seconds."""
        self._forget(int(time.monotonic()))
        return sum(tokens for _, tokens in self._seconds) / _WINDOW

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - _WINDOW:
            self._seconds.popleft()


class RequestMetrics:
    """Times and counts one HTTP request."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics, self._endpoint = metrics, endpoint
        self._begin = time.monotonic()
        self._read: set[int] = set()
        # For each output: when its first token came, and how many came after that.
        self._outputs: dict[int, tuple[float, int]] = {}

    def take(self, piece: OutputDelta, prompt: int) -> None:
        """Notes what has just come for one of the prompts."""
        now, metrics = time.monotonic(), self._metrics
        if piece.token_ids:
            metrics.speed.add(len(piece.token_ids))
            if prompt not in self._read:
                self._read.add(prompt)
                metrics.first_token_seconds.observe(now - self._begin)
            first, later = self._outputs.get(piece.index, (now, -1))
            self._outputs[piece.index] = first, later + len(piece.token_ids)
        if piece.finish_reason is not None:
            first, later = self._outputs.get(piece.index, (now, 0))
            if later > 0:
                metrics.token_seconds.observe((now - first) / later)

    def close(self, outcome: str) -> None:
        """Counts the request by what became of it."""
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        seconds = time.monotonic() - self._begin
        self._metrics.request_seconds.labels(self._endpoint).observe(seconds)
