"""One copy of the model in a Ray Serve deployment, with the whole application around it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Message

from h2okv.engine.serving.async_llm import AsyncLLM
from h2okv.server.app import make_app
from h2okv.server.ray_board import Numbers
from h2okv.server.relay import messages_of, plain_scope
from h2okv.server.settings import ServerSettings


class Replica:
    """Answers what the front hands on.

    Args:
        model: What `AsyncLLM` takes first.
        options: What it takes else; picklable.
        settings: Of the server.
        board: Where its numbers go.
    """

    def __init__(
        self, model: str, options: dict[str, Any], settings: ServerSettings, board: Any
    ) -> None:
        self._board = board
        self._engine = AsyncLLM(model, **options)
        # The front has checked who asks.
        self._app = make_app(self._engine, dataclasses.replace(settings, api_key=None, hosts=None))

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Answers one HTTP request.

        Args:
            scope: Of ASGI, from `plain_scope`.
            body: The whole body.

        Yields:
            ASGI messages, as they come.
        """
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
