"""Server replicas on a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.cluster.metrics import Numbers, make_board, merge_metrics, merge_stats
from h2okv.cluster.ray_cluster import reason
from h2okv.cluster.router import CopyLostError, Relay, RelayCounts, messages_of, plain_scope
from h2okv.engine.llm import AsyncLLM
from h2okv.engine.outputs import EngineStoppedError, QueueFullError
from h2okv.server.app import make_app
from h2okv.server.config import ServerSettings
from h2okv.server.middleware import Guard

_PATIENCE = 2.0
"""Seconds that the board has to tell what is on it."""
_INERTIA = 0.9
"""How much of the mean time of a request stays with each further one."""


class Front:
    """Hands each request to the replica that Serve's router chooses.

    The router asks two replicas how much they have to do, and takes the one with less; what finds
    no room waits here, so that the next row that is free anywhere serves it.
    """

    def __init__(self, replicas: DeploymentHandle, settings: ServerSettings, board: Any) -> None:
        self._replicas, self._board = replicas, board
        self._mean_seconds = 1.0
        self._counts = RelayCounts()
        self._relay = Relay(self._ask, settings.timeout, self._counts)
        self._app = Guard(self._route, settings)

    async def __call__(self, request: Request) -> Response:
        """Answers a request that Serve's proxy brings."""
        return _Running(self._app)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers what is about all replicas; what is about one text goes to one of them."""
        own = {"/health": self._health, "/stats": self._stats, "/metrics": self._metrics}
        page = own.get(scope["path"]) if scope["method"] == "GET" else None
        if page is None:
            await self._relay(scope, receive, send)
        else:
            await (await page())(scope, receive, send)

    async def _ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Hands a request to a replica, and tells the router's errors by our names."""
        begin = time.monotonic()
        handle = self._replicas.options(method_name="answer", stream=True)
        stream: Any = handle.remote(scope, body)
        try:
            async for messages in stream:
                yield messages
            passed = time.monotonic() - begin
            self._mean_seconds += (1 - _INERTIA) * (passed - self._mean_seconds)
        except BackPressureError as error:
            waiting = int(error.args[0])
            rows = sum(one.stats["rows"] for one in await self._numbers())
            raise QueueFullError(waiting, waiting * self._mean_seconds / max(1, rows)) from None
        except DeploymentUnavailableError:
            raise EngineStoppedError("no copy of the model could be started.") from None
        except (RayActorError, ReplicaUnavailableError):
            raise CopyLostError from None
        except (asyncio.CancelledError, GeneratorExit):
            # The client has gone: its row shall be free at once.
            stream.cancel()
            raise

    async def _numbers(self) -> list[Numbers]:
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._board.get.remote()
        except (TimeoutError, RayActorError):
            return []

    async def _health(self) -> Response:
        alive = len(await self._numbers())
        state = {"status": "ok" if alive else "stopped", "replicas": alive}
        return JSONResponse(state, 200 if alive else 503)

    async def _stats(self) -> Response:
        merged = merge_stats([one.stats for one in await self._numbers()], self._counts)
        return JSONResponse(merged, headers={"Cache-Control": "no-store"})

    async def _metrics(self) -> Response:
        texts = {one.replica: one.metrics for one in await self._numbers()}
        # Parsing several pages takes longer than streams should wait for.
        page = await asyncio.to_thread(merge_metrics, texts, self._counts)
        return Response(page, media_type=CONTENT_TYPE_LATEST)


class _Running(Response):
    """Lets an ASGI application answer, where Serve wants a response."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class Replica:
    """Answers what the front hands on."""

    def __init__(
        self, model: str, options: dict[str, Any], settings: ServerSettings, board: Any
    ) -> None:
        self._board = board
        self._engine = AsyncLLM(model, **options)
        # The front has checked who asks.
        self._app = make_app(self._engine, dataclasses.replace(settings, api_key=None, hosts=None))

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Answers one HTTP request."""
        async for messages in messages_of(self._app, scope, body):
            yield messages

    async def describe(self) -> tuple[str, int]:
        """Says what is served with which memory, and how many rows there are."""
        return self._engine.describe(), self._engine.stats().rows

    async def check_health(self) -> None:
        """Tells the board how it is doing, and Serve to replace it if its engine has stopped.

        Serve calls this every second, however many requests there are.
        """
        if not self._engine.is_healthy:
            raise RuntimeError("the engine has stopped")
        name = serve.get_replica_context().replica_id.unique_id
        stats, metrics = [await self._page(path) for path in ("/stats", "/metrics")]
        self._board.put.remote(Numbers(name, json.loads(stats), metrics.decode()))

    async def __del__(self) -> None:
        """Stops the engine; Serve calls this after the replica's last request."""
        if hasattr(self, "_engine"):
            await self._engine.aclose(drain=0)

    async def _page(self, path: str) -> bytes:
        scope = plain_scope({"method": "GET", "path": path, "headers": []})
        found = [one async for messages in messages_of(self._app, scope, b"") for one in messages]
        return b"".join(message.get("body", b"") for message in found)


REPLICA = "model"
FRONT = "front"
_HEALTH_PERIOD = 1.0
_SLACK = 1024
"""Requests that the front looks at beyond those that wait, to refuse them in our own words."""


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """What is served, and on what.

    Attributes:
        model: What `AsyncLLM` takes first: a folder, a Hub id or ``"bundled"``, on every machine.
        options: What it takes else.
        settings: Of the server.
        replicas: Copies of the model.
        rows: Requests that a copy takes at once.
        waiting: Requests that may wait for a row; more get HTTP 429.
        cpus: Processors of a copy.
        gpus: GPUs of a copy.
        drain: Seconds that running requests have at the end.
    """

    model: str
    options: dict[str, Any]
    settings: ServerSettings
    replicas: int
    rows: int
    waiting: int
    cpus: float
    gpus: float
    drain: float


def application(deployed: Deployed, board: Any) -> Application:
    """Puts the application together."""
    replica = serve.deployment(
        name=REPLICA,
        num_replicas=deployed.replicas,
        max_ongoing_requests=deployed.rows,
        # The queue is the front's: whichever replica has a free row takes its first request.
        max_queued_requests=max(1, deployed.waiting),
        health_check_period_s=_HEALTH_PERIOD,
        graceful_shutdown_timeout_s=deployed.drain,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": deployed.cpus, "num_gpus": deployed.gpus},
    )(Replica).bind(deployed.model, deployed.options, deployed.settings, board)
    return serve.deployment(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=deployed.replicas * deployed.rows + deployed.waiting + _SLACK,
        health_check_period_s=_HEALTH_PERIOD,
        graceful_shutdown_timeout_s=deployed.drain,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
    )(Front).bind(replica, deployed.settings, board)


APP = "h2okv"


class RayService:
    """Serve on a cluster that was joined before; ended on leaving."""

    def __init__(self, host: str, port: int, is_local: bool) -> None:
        _quieten()
        if serve.status().proxies:
            raise ValueError(
                "Ray Serve runs on this cluster already, with a host and a port of its own; end it"
                " with `serve shutdown`, or use another cluster"
            )
        serve.start(
            proxy_location="HeadOnly" if is_local else "EveryNode",
            http_options={"host": host, "port": port},
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )

        self._board = make_board()

    def __enter__(self) -> RayService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Takes no more requests, and ends when those that run have finished."""
        serve.delete(APP)
        serve.shutdown()
        ray.kill(self._board)

    def deploy(self, deployed: Deployed) -> tuple[str, int]:
        """Loads the models, and begins to take requests."""
        logs = {"enable_access_log": False, "log_level": "ERROR"}
        try:
            serve.run(application(deployed, self._board), name=APP, logging_config=logs)
            handle = serve.get_deployment_handle(REPLICA, APP)
            told: Any = handle.broadcast("describe").results(timeout_s=60)
            description, rows = min(told, key=lambda one: one[1])
            if rows != deployed.rows:
                serve.run(
                    application(dataclasses.replace(deployed, rows=rows), self._board),
                    name=APP,
                    logging_config=logs,
                )
        except RuntimeError as error:
            raise ValueError(f"the model cannot be served ({_why(error)})") from error
        return description, rows


def _why(error: BaseException) -> str:
    """What a replica said when it could not start, if it has."""
    found = serve.status().applications.get(APP)
    for deployment in found.deployments.values() if found else ():
        if "Error" in deployment.message:
            return reason(RuntimeError(deployment.message))
    return reason(error)


def _quieten() -> None:
    """Keeps Serve's progress away from the command's own remarks; its log files have it."""
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
