"""What the server counts, in Prometheus' form."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from h2okv.engine.outputs import EngineStats, Piece
from h2okv.server.config import ServedEngine

_PREFIX = "h2okv_"
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_WINDOW = 10
"""Seconds that the present speed is taken over."""

_GAUGES = {
    "rows": "Rows of the cache.",
    "rows_in_use": "Rows that requests have taken.",
    "waiting": "Requests that have not begun.",
    "cache_bytes": "Bytes of the cache entries that are held now.",
    "full_bytes": "Bytes that a full cache would hold for the same tokens.",
    "reserved_bytes": "Bytes of all rows, in use or not.",
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


class Metrics:
    """All that ``/metrics`` tells; in a registry of its own.

    Attributes:
        registry: Has everything.
        requests: Counter of HTTP requests by endpoint and outcome.
        request_seconds: Histogram of their time, by endpoint.
        first_token_seconds: Histogram of the time from a request to its first token.
        token_seconds: Histogram of the mean time between tokens of an output.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            f"{_PREFIX}requests",
            "HTTP requests, by what became of them.",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "From a request to the end of its answer.",
            ["endpoint"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            f"{_PREFIX}time_to_first_token_seconds",
            "From a prompt's arrival to its first token, waiting included.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.token_seconds = Histogram(
            f"{_PREFIX}time_per_token_seconds",
            "Mean time between the tokens of an output, after the first.",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.speed = RecentSpeed()
        self.registry.register(_EngineNumbers(engine, self.speed))

    def text(self) -> bytes:
        """Returns all numbers in Prometheus' text form."""
        return generate_latest(self.registry)


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
        """Returns the mean of the last ten seconds."""
        now = time.monotonic()
        self._forget(int(now))
        return sum(tokens for _, tokens in self._seconds) / _WINDOW

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - _WINDOW:
            self._seconds.popleft()


class Stopwatch:
    """Takes the times of one prompt's outputs."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begin = time.monotonic()
        self._has_first = False
        # For each output: when its first token came, and how many came after that.
        self._outputs: dict[int, tuple[float, int]] = {}

    def note(self, piece: Piece) -> None:
        """Notes a piece that has just come."""
        now = time.monotonic()
        if piece.token_ids:
            self._metrics.speed.add(len(piece.token_ids))
            if not self._has_first:
                self._has_first = True
                self._metrics.first_token_seconds.observe(now - self._begin)
            first, later = self._outputs.get(piece.index, (now, -1))
            self._outputs[piece.index] = first, later + len(piece.token_ids)
        if piece.finish_reason is not None:
            first, later = self._outputs.get(piece.index, (now, 0))
            if later > 0:
                self._metrics.token_seconds.observe((now - first) / later)


class _EngineNumbers(Collector):
    """The engine's own numbers, read when they are asked for."""

    def __init__(self, engine: ServedEngine, speed: RecentSpeed) -> None:
        self._engine, self._speed = engine, speed

    def collect(self) -> Iterable[Metric]:
        stats: EngineStats = self._engine.stats()
        for name, meaning in _GAUGES.items():
            yield GaugeMetricFamily(f"{_PREFIX}{name}", meaning, value=getattr(stats, name))
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}{name}", meaning, value=getattr(stats, name))
        yield GaugeMetricFamily(
            f"{_PREFIX}tokens_per_second",
            "Tokens generated in a second, over the last ten.",
            value=self._speed.per_second(),
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}healthy", "1 while requests are taken.", value=int(self._engine.is_healthy)
        )

    def describe(self) -> Iterable[Metric]:
        """Names nothing in advance, so that registering asks the engine nothing."""
        return []
