"""Server replicas on a Ray cluster, behind Ray Serve's proxy."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application, exceptions
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.cluster import cluster, place_copies, reason
from h2okv.cluster.router import ReplicaLostError, Router, messages_of
from h2okv.engine.llm import AsyncLLM
from h2okv.engine.outputs import EngineStoppedError, QueueFullError
from h2okv.server.app import guarded, make_app
from h2okv.server.config import ServeRequest, ServerSettings
from h2okv.server.launch import announce, open_port

APP, REPLICA, FRONT = "h2okv", "model", "front"
_STALE = 6.0  # seconds without a report after which a replica counts as gone
_SHARED = ("model", "max_budget", "max_context", "max_prompt_tokens", "max_new_tokens")
"""Statistics that are equal for all replicas and not summed."""
_INERTIA = 0.9  # decay of the moving average of a request's seconds
_SLACK = 1024
"""Requests that the front accepts beyond the queue, to refuse them with our own message."""
_SEQUENCES = 64  # assumed sequences of a replica until it reports its number
_LOGGING = {"enable_access_log": False, "log_level": "ERROR"}


class ReplicaNumbers(NamedTuple):
    """A replica's name, its ``/stats``, and the text of its ``/metrics``."""

    replica: str
    stats: dict[str, Any]
    metrics: str


def merge_stats(numbers: Sequence[ReplicaNumbers], router: Router) -> dict[str, Any]:
    """Sum the numbers of ``/stats``."""
    merged: dict[str, Any] = {"replicas": len(numbers)}
    merged |= {"retried": router.retried, "broken": router.broken}
    for report in numbers:
        for name, value in report.stats.items():
            if name in _SHARED or not isinstance(value, int | float):
                merged.setdefault(name, value)
            else:
                merged[name] = merged.get(name, 0) + value
    return merged


def merge_metrics(numbers: Sequence[ReplicaNumbers], router: Router) -> bytes:
    """Return the page of ``/metrics``, on which each sample is labelled with its replica."""
    families: dict[str, Metric] = {}
    for report in numbers:
        for family in text_string_to_metric_families(report.metrics):
            empty = Metric(family.name, family.documentation, family.type)
            merged = families.setdefault(family.name, empty)
            for sample in family.samples:
                labels = {**sample.labels, "replica": report.replica}
                merged.add_sample(sample.name, labels, sample.value)
    retried = "Requests given to another copy."
    broken = "Streams that ended with an error, because their copy was lost."
    metrics = [
        *families.values(),
        GaugeMetricFamily("h2okv_replicas", "Copies that answered.", value=len(numbers)),
        CounterMetricFamily("h2okv_retried", retried, value=router.retried),
        CounterMetricFamily("h2okv_broken_streams", broken, value=router.broken),
    ]
    registry: Any = SimpleNamespace(collect=lambda: metrics)  # the only method that is used
    return generate_latest(registry)


class Replica:
    """A model that answers the requests that the front passes on."""

    def __init__(self, request: ServeRequest) -> None:
        request = request.for_model()
        self._notes = request.notes
        self._engine = AsyncLLM(request.model, config=request.engine, **request.loading)
        # The front has checked the client.
        self._app = make_app(self._engine, request.server)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        async for messages in messages_of(self._app, scope, body):
            yield messages

    async def describe(self) -> tuple[str, int]:
        lines = [self._engine.describe(), *self._notes]
        return "\n".join(lines), self._engine.stats().max_num_seqs

    async def check_health(self) -> None:
        """Report to the front; raise, so that Serve replaces it, if the engine has stopped."""
        if not self._engine.is_healthy:
            raise RuntimeError("the engine has stopped")
        name = serve.get_replica_context().replica_id.unique_id
        handlers = self._app.state.handlers
        page = handlers.metrics.text().decode()
        front: Any = serve.get_deployment_handle(FRONT, APP)
        front.put.remote(ReplicaNumbers(name, handlers.stats(), page))

    async def __del__(self) -> None:
        """Stop the engine; Serve calls this after the replica's last request."""
        if hasattr(self, "_engine"):
            await self._engine.aclose(drain=0)


class Front:
    """The entry of the server; Serve's router chooses a replica, of two the less busy one."""

    def __init__(
        self, replicas: DeploymentHandle, settings: ServerSettings, max_num_seqs: int
    ) -> None:
        self._replicas = replicas
        # The latest report of each replica and its time; asking a busy replica would take long.
        self._numbers: dict[str, tuple[float, ReplicaNumbers]] = {}
        self._max_num_seqs = max_num_seqs  # of all replicas together
        self._mean_seconds = 1.0
        self._router = Router(self._call, settings.timeout, settings.max_body)
        self._app = guarded(self._route, settings)

    async def __call__(self, request: Request) -> Response:
        """Answer a request of Serve's proxy, which expects a response object."""
        return _AppResponse(self._app)

    async def put(self, numbers: ReplicaNumbers) -> None:
        self._numbers[numbers.replica] = time.monotonic(), numbers

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer requests about all replicas; pass others to one of them."""
        path = scope["path"]
        answer: ASGIApp = self._router
        if scope["method"] == "GET" and path in ("/health", "/stats", "/metrics"):
            answer = await self._status(path)
        await answer(scope, receive, send)

    async def _call(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Send a request to a replica, and map Ray's errors to the server's."""
        begin = time.monotonic()
        handle = self._replicas.options(method_name="answer", stream=True)
        stream: Any = handle.remote(scope, body)
        try:
            async for messages in stream:
                yield messages
            passed = time.monotonic() - begin
            self._mean_seconds += (1 - _INERTIA) * (passed - self._mean_seconds)
        except exceptions.BackPressureError as error:
            waiting = int(error.args[0])
            seconds = waiting * self._mean_seconds / self._max_num_seqs
            raise QueueFullError(waiting, seconds) from None
        except exceptions.DeploymentUnavailableError:
            raise EngineStoppedError("no copy of the model could be started.") from None
        except (RayActorError, exceptions.ReplicaUnavailableError):
            raise ReplicaLostError from None
        except (asyncio.CancelledError, GeneratorExit):
            # The client disconnected: free its slot at once.
            stream.cancel()
            raise

    async def _status(self, path: str) -> Response:
        since = time.monotonic() - _STALE
        self._numbers = {
            name: report for name, report in self._numbers.items() if report[0] > since
        }
        numbers = [report for _, report in self._numbers.values()]
        if path == "/health":
            state = {"status": "ok" if numbers else "stopped", "replicas": len(numbers)}
            return JSONResponse(state, 200 if numbers else 503)
        if path == "/stats":
            merged = merge_stats(numbers, self._router)
            return JSONResponse(merged, headers={"Cache-Control": "no-store"})
        # Parsing several pages would delay streams: do it in a thread.
        page = await asyncio.to_thread(merge_metrics, numbers, self._router)
        return Response(page, media_type=CONTENT_TYPE_LATEST)


class _AppResponse(Response):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def application(
    request: ServeRequest, copies: int, resources: dict[str, float], max_num_seqs: int
) -> Application:
    """Build the application; each copy of the model runs ``max_num_seqs`` requests at once."""
    settings, waiting = request.server, request.engine.max_waiting
    common: dict[str, Any] = {
        "health_check_period_s": 1.0,
        "graceful_shutdown_timeout_s": settings.drain,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
    replica = serve.deployment(
        name=REPLICA,
        num_replicas=copies,
        max_ongoing_requests=max_num_seqs,
        # The front has the queue: the next replica with a free slot takes its first request.
        max_queued_requests=max(1, waiting),
        ray_actor_options=resources,
        **common,
    )(Replica).bind(request)
    return serve.deployment(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=copies * max_num_seqs + waiting + _SLACK,
        ray_actor_options={"num_cpus": 0},
        **common,
    )(Front).bind(replica, settings, copies * max_num_seqs)


def run_server_on_ray(request: ServeRequest, device: str, replicas: int | None) -> int:
    """Serve on a Ray cluster until a signal; by default one replica a GPU or machine."""
    settings, engine = request.server, request.engine
    # Serve's proxy, another process, opens the port again.
    with open_port(settings.host, settings.port) as opened:
        port = opened.getsockname()[1]
    ended, stdout = threading.Event(), sys.stdout

    def on_signal(number: int, frame: object) -> None:
        ended.set()
        signal.signal(number, signal.SIG_DFL)

    with ExitStack() as stack:
        ray = stack.enter_context(cluster())
        # After Ray, which installs a SIGTERM handler. A second signal ends the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, on_signal))
        copies, resources = place_copies(ray, device, replicas)
        make = partial(application, request, copies, resources)
        _start(settings.host, port, settings.is_local)
        stack.callback(serve.shutdown)
        stack.callback(serve.delete, APP)  # runs first, after running requests have finished
        description, sequences = _deploy(make, engine.max_num_seqs or _SEQUENCES)
        served = f"{copies} replicas with {sequences} sequences each. {description}"
        with redirect_stdout(stdout):
            announce(settings, port, served)
        ended.wait()
    return 0


def _start(host: str, port: int, is_local: bool) -> None:
    """Start Serve; refuse if it already runs."""
    # Hide its progress; its log files have it.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    if serve.status().proxies:
        raise ValueError(
            "Ray Serve already runs on this cluster, with its own host and port; end it with"
            " `serve shutdown`, or use another cluster"
        )
    serve.start(
        proxy_location="HeadOnly" if is_local else "EveryNode",
        http_options={"host": host, "port": port},
        logging_config=_LOGGING,
    )


def _deploy(make: Callable[[int], Application], expected: int) -> tuple[str, int]:
    """Load the models and start to accept requests; return how many each runs at once."""
    try:
        serve.run(make(expected), name=APP, logging_config=_LOGGING)
        handle = serve.get_deployment_handle(REPLICA, APP)
        descriptions: Any = handle.broadcast("describe").results(timeout_s=60)
        description, sequences = min(descriptions, key=lambda description: description[1])
        if sequences != expected:
            serve.run(make(sequences), name=APP, logging_config=_LOGGING)
    except RuntimeError as error:
        status = serve.status().applications.get(APP)
        deployments = status.deployments.values() if status else ()
        messages = [deployment.message for deployment in deployments]
        # Prefer the error of a replica that could not start.
        why = next((RuntimeError(text) for text in messages if "Error" in text), error)
        raise ValueError(f"the model cannot be served ({reason(why)})") from error
    return description, sequences
