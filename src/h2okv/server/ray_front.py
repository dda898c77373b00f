"""What Ray Serve's HTTP proxy talks to: checks requests, and hands them to a replica with room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.engine.serving.errors import EngineStoppedError, QueueFullError
from h2okv.server.guard import Guard
from h2okv.server.merged_metrics import merge_metrics, merge_stats
from h2okv.server.ray_board import Numbers
from h2okv.server.relay import CopyLostError, Relay, RelayCounts
from h2okv.server.settings import ServerSettings

_PATIENCE = 2.0
"""Seconds that the board has to tell what is on it."""
_INERTIA = 0.9
"""How much of the mean time of a request stays with each further one."""


class Front:
    """Hands each request to the replica that Serve's router chooses.

    The router asks two replicas how much they have to do, and takes the one with less; what finds
    no room waits here, so that the next row that is free anywhere serves it.

    Args:
        replicas: The handle of the deployment of `Replica`.
        settings: Of the server: the key, the names and the limits.
        board: Where replicas leave their numbers.
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
