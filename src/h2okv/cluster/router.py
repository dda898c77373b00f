"""A router that passes requests to replicas, and to another one when a replica is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.server.errors import ApiError, as_api_error, timed_out
from h2okv.server.handlers import while_connected
from h2okv.server.protocol import read_limited

Messages = AsyncGenerator[list[Message], None]
Call = Callable[[dict[str, Any], bytes], Messages]
"""Sends a request's scope and body to a replica; yields the messages of the response."""

_TRIES = 5
_PAUSE = 0.2  # seconds before the second attempt; one more for each further attempt
_GRACE = 1.0  # seconds for a replica to report a timeout itself
_STOPPED = 503
_TRAVELS = (
    "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server",
)  # fmt: skip
"""Fields of a scope that are sent to another process, in addition to the headers."""


class ReplicaLostError(Exception):
    """The replica serving a request died."""


class Router:
    """An ASGI application over replicas; a replica's death ends only streams that had begun."""

    def __init__(self, call: Call, timeout: float, max_body: int = 8 << 20) -> None:
        self._call, self._timeout, self._max_body = call, timeout, max_body
        self.retried = 0  # requests sent to another replica
        self.broken = 0  # streams that ended with an error after their start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(send)
        fields = {name: scope[name] for name in _TRAVELS if name in scope}
        fields["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        asgi = {"version": "3.0", "spec_version": "2.3"}
        fields = {"type": "http", "asgi": asgi, "query_string": b"", "root_path": "", **fields}
        try:
            async with asyncio.timeout(self._timeout + _GRACE):
                body = await read_limited(Request(scope, receive), self._max_body)
                await while_connected(receive, self._try_all(fields, body, response))
            return
        except ClientDisconnect:
            return
        except TimeoutError:
            error = timed_out(self._timeout)
        except Exception as exception:  # the client gets every error
            error = as_api_error(exception)
        if not response.has_begun:
            await error.response()(scope, receive, send)
            return
        self.broken += 1
        if not response.is_over:
            last = f"data: {json.dumps(error.body())}\n\n".encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _try_all(self, scope: dict[str, Any], body: bytes, response: _Response) -> None:
        for attempt in range(_TRIES):
            if attempt:
                self.retried += 1
                await asyncio.sleep(_PAUSE * attempt)
            response.discard()
            with suppress(ReplicaLostError):
                async with aclosing(self._call(scope, body)) as stream:
                    async for messages in stream:
                        await response.take(messages)
                if response.is_over and (response.status != _STOPPED or attempt == _TRIES - 1):
                    await response.release()
                    return
            if response.has_begun:
                raise _lost("after the answer had begun, which stays incomplete")
        raise _lost(f"{_TRIES} times, on every replica that got the request")


class _Response:
    """The messages of a response, buffered until they may be sent to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.discard()

    def discard(self) -> None:
        self._buffer: list[Message] = []
        self.status, self.is_over, self._streams = 0, False, False

    async def take(self, messages: list[Message]) -> None:
        """Add a replica's messages; a stream is passed on from its first text on."""
        for message in messages:
            self._buffer.append(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
                kind = dict(message["headers"]).get(b"content-type", b"")
                self._streams = kind.startswith(b"text/event-stream")
            elif not message.get("more_body", False):
                self.is_over = True
        if self.has_begun or (self._streams and any(m.get("body") for m in self._buffer)):
            await self.release()

    async def release(self) -> None:
        messages, self._buffer = self._buffer, []
        for message in messages:
            self.has_begun = True
            await self._send(message)


async def messages_of(app: ASGIApp, scope: Scope, body: bytes) -> Messages:
    """Run an application for one request, in the replica's process."""
    queue: asyncio.Queue[Message | None] = asyncio.Queue()
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        # After the body comes only a disconnect, which is a cancellation here.
        return request.pop() if request else await asyncio.Future()

    running = asyncio.ensure_future(app(scope, receive, queue.put))
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        is_over = False
        while not is_over:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            is_over = batch[-1] is None
            if messages := [message for message in batch if message is not None]:
                yield messages
        await running
    finally:
        running.cancel()
        with suppress(BaseException):
            await running


def _lost(when: str) -> ApiError:
    return ApiError(
        _STOPPED,
        f"the process that answered was lost {when}; send the request again.",
        code="replica_lost",
        retry_after=5,
    )
