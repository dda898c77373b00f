"""Hands requests to replicas, and asks another one where a replica is lost."""

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
Ask = Callable[[dict[str, Any], bytes], Messages]
"""Hands a request to a replica: its scope and its body; gives the messages of the answer."""

_TRIES = 5
_PAUSE = 0.2  # seconds before a second try; twice as many before the third, and so on
_GRACE = 1.0  # seconds that a replica has to tell itself that a request took too long
_STOPPED = 503
_TRAVELS = (
    "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server",
)  # fmt: skip
"""The parts of a scope that travel to another process, beside the headers."""


class ReplicaLostError(Exception):
    """The replica that had a request is no more."""


class Router:
    """An ASGI application that has replicas answer; with one die only streams that had begun."""

    def __init__(self, ask: Ask, timeout: float, max_body: int = 8 << 20) -> None:
        self._ask, self._timeout, self._max_body = ask, timeout, max_body
        self.retried = 0  # requests that were given to another replica
        self.broken = 0  # streams that ended with an error, because they had begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        plain = {name: scope[name] for name in _TRAVELS if name in scope}
        plain["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        asgi = {"version": "3.0", "spec_version": "2.3"}
        plain = {"type": "http", "asgi": asgi, "query_string": b"", "root_path": "", **plain}
        try:
            async with asyncio.timeout(self._timeout + _GRACE):
                body = await read_limited(Request(scope, receive), self._max_body)
                await while_connected(receive, self._try_all(plain, body, answer))
            return
        except ClientDisconnect:
            return
        except TimeoutError:
            told = timed_out(self._timeout)
        except Exception as error:  # the client gets it, whatever it is
            told = as_api_error(error)
        if not answer.has_begun:
            await told.response()(scope, receive, send)
            return
        self.broken += 1
        if not answer.is_over:
            last = f"data: {json.dumps(told.body())}\n\n".encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _try_all(self, scope: dict[str, Any], body: bytes, answer: _Answer) -> None:
        for attempt in range(_TRIES):
            if attempt:
                self.retried += 1
                await asyncio.sleep(_PAUSE * attempt)
            answer.discard()
            with suppress(ReplicaLostError):
                async with aclosing(self._ask(scope, body)) as stream:
                    async for messages in stream:
                        await answer.take(messages)
                if answer.is_over and (answer.status != _STOPPED or attempt == _TRIES - 1):
                    await answer.release()
                    return
            if answer.has_begun:
                raise _lost("after the answer had begun, so that it stays incomplete")
        raise _lost(f"{_TRIES} times, with whichever copy of the model had the request")


class _Answer:
    """The messages of an answer, held back until the client can be shown them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.discard()

    def discard(self) -> None:
        self._held: list[Message] = []
        self.status, self.is_over, self._streams = 0, False, False

    async def take(self, messages: list[Message]) -> None:
        """Take what a replica says; a stream is passed on as soon as it has its first text."""
        for message in messages:
            self._held.append(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
                kind = dict(message["headers"]).get(b"content-type", b"")
                self._streams = kind.startswith(b"text/event-stream")
            elif not message.get("more_body", False):
                self.is_over = True
        if self.has_begun or (self._streams and any(m.get("body") for m in self._held)):
            await self.release()

    async def release(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self.has_begun = True
            await self._send(message)


async def messages_of(app: ASGIApp, scope: Scope, body: bytes) -> Messages:
    """Run an application for one request, on the side of the replica."""
    coming: asyncio.Queue[Message | None] = asyncio.Queue()
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        # After the body there is only the end of the connection, which is a cancellation here.
        return request.pop() if request else await asyncio.Future()

    running = asyncio.ensure_future(app(scope, receive, coming.put))
    running.add_done_callback(lambda _: coming.put_nowait(None))
    try:
        is_over = False
        while not is_over:
            found = [await coming.get()]
            while not coming.empty():
                found.append(coming.get_nowait())
            is_over = found[-1] is None
            if messages := [message for message in found if message is not None]:
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
