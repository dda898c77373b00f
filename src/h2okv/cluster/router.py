"""Hands requests to replicas, and retries what was lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.server.errors import ApiError, as_api_error, timed_out
from h2okv.server.generation import ClientGoneError, closed_after, while_present

Ask = Callable[[dict[str, Any], bytes], AsyncIterator[list[Message]]]
"""Hands a request to a copy: its scope and its body; gives the messages of the answer."""

_TRIES = 5
_PAUSE = 0.2
"""Seconds before a second try; twice as many before the third, and so on."""
_GRACE = 1.0
"""Seconds that a copy has to tell itself that a request took too long."""
_STOPPED = 503


class CopyLostError(Exception):
    """The copy that had a request is no more."""


@dataclass
class RelayCounts:
    """What became of requests; only grows.

    Attributes:
        retried: Requests that were given to another copy.
        broken: Streams that ended with an error, because they had begun.
    """

    retried: int = 0
    broken: int = 0


class Relay:
    """An ASGI application that has others answer.

    A copy that dies takes with it only streams that had begun: those end with an error event.
    Whatever was not begun is asked of another copy, and the client sees nothing of it.
    """

    def __init__(self, ask: Ask, timeout: float, counts: RelayCounts) -> None:
        self._ask, self._timeout, self.counts = ask, timeout, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        body = await _read(receive)
        if body is None:
            return
        answer = _Answer(send)
        told: ApiError | None = None
        try:
            async with asyncio.timeout(self._timeout + _GRACE):
                await while_present(receive, self._try_all(plain_scope(scope), body, answer))
        except ClientGoneError:
            return
        except TimeoutError:
            told = timed_out(self._timeout)
        except Exception as error:  # the client gets it, whatever it is
            told = as_api_error(error)
        if told is not None:
            self.counts.broken += answer.has_begun
            await answer.end(told, scope, receive)

    async def _try_all(self, scope: dict[str, Any], body: bytes, answer: _Answer) -> None:
        for attempt in range(_TRIES):
            if attempt:
                self.counts.retried += 1
                await asyncio.sleep(_PAUSE * attempt)
            try:
                async with closed_after(self._ask(scope, body)) as stream:
                    async for messages in stream:
                        await answer.take(messages)
                if answer.is_over and (answer.status != _STOPPED or attempt == _TRIES - 1):
                    await answer.release()
                    return
                if answer.has_begun:
                    raise CopyLostError
            except CopyLostError:
                if answer.has_begun:
                    raise _lost("after the answer had begun, so that it stays incomplete") from None
            answer.forget()
        raise _lost(f"{_TRIES} times, with whichever copy of the model had the request")


class _Answer:
    """The messages of an answer, held back until the client can be shown them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []
        self.status = 0
        self.has_begun = False
        self.is_over = False
        self._streams = False

    async def take(self, messages: list[Message]) -> None:
        """Takes what a copy says; a stream is passed on as soon as it has a first piece."""
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
        """Passes on what is held back."""
        held, self._held = self._held, []
        for message in held:
            self.has_begun = True
            await self._send(message)

    def forget(self) -> None:
        """Drops what a copy said that is no more."""
        self._held, self.status, self.is_over, self._streams = [], 0, False, False

    async def end(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Tells the client of an error: as a response, or as the last event of a stream."""
        if not self.has_begun:
            await error.response()(scope, receive, self._send)
        elif not self.is_over:
            last = f"data: {json.dumps(error.body())}\n\n".encode()
            await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def messages_of(app: ASGIApp, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
    """Runs an application for one request, on the side of the copy."""
    coming: asyncio.Queue[Message | None] = asyncio.Queue()
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        # After the body there is only the end of the connection, which is a cancellation here.
        return request.pop() if request else await asyncio.Future()

    async def run() -> None:
        try:
            await app(scope, receive, coming.put)
        finally:
            coming.put_nowait(None)

    running = asyncio.create_task(run())
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


def plain_scope(scope: Scope) -> dict[str, Any]:
    """The parts of a scope that travel to another process."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": scope.get("http_version", "1.1"),
        "method": scope["method"],
        "scheme": scope.get("scheme", "http"),
        "path": scope["path"],
        "raw_path": scope.get("raw_path") or scope["path"].encode(),
        "query_string": scope.get("query_string", b""),
        "root_path": "",
        "headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        "client": scope.get("client"),
        "server": scope.get("server"),
    }


async def _read(receive: Receive) -> bytes | None:
    """The whole body; ``None`` if the client goes away before its end."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
    return None


def _lost(when: str) -> ApiError:
    return ApiError(
        _STOPPED,
        f"the process that answered was lost {when}; send the request again.",
        kind="server_error",
        code="replica_lost",
        outcome="lost",
        retry_after=5,
    )
