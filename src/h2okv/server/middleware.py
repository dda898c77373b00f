"""Key, host and size of a request."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.server.config import ServerSettings
from h2okv.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/", "/view"})
"""What needs no key: whether the server lives, and pages, which browsers ask for without one."""

_LINGER = 2.0
"""Seconds in which the rest of a body that is too large is thrown away."""


class BodyTooLargeError(Exception):
    """A body came without its length, and went on and on."""


class Guard:
    """Refuses requests by their head, and bodies by their size. A pure ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refused request itself, and hands on the others."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(refusal, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, self._counted(receive), sending)
        except BodyTooLargeError:
            if not started:
                await _refuse(self._too_large(), receive, send)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """What is wrong with a request's head."""
        host = headers.get(b"host", b"").decode("latin-1")
        hosts = self.settings.hosts
        if hosts is not None and _host_name(host) not in hosts:
            return ApiError(
                403,
                f"Host {host!r} is not this server's; use its own address, or start it with an API"
                " key (H2OKV_API_KEY), which takes requests under any name.",
                code="wrong_host",
            )
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return ApiError(
                401,
                "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.settings.max_body:
            return self._too_large()
        return None

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        if self.settings.api_key is None:
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # In constant time, so that the time tells nothing of how much of a guess is right.
        is_right = secrets.compare_digest(key.strip(), self.settings.api_key.strip().encode())
        return is_right and scheme.lower() == b"bearer"

    def _counted(self, receive: Receive) -> Receive:
        """Receives no more than may come."""
        left = self.settings.max_body

        async def counting() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise BodyTooLargeError
            return message

        return counting

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self.settings.max_body} bytes; send less, or start the server"
            " with a larger --max-body.",
            code="body_too_large",
        )


async def _refuse(refusal: ApiError, receive: Receive, send: Send) -> None:
    """Answers, then lets the client finish sending for a while, or it would not see the answer."""
    body = json.dumps(refusal.body()).encode()
    head = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **refusal.headers(),
    }
    headers = [(name.lower().encode(), value.encode()) for name, value in head.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    try:
        async with asyncio.timeout(_LINGER):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _host_name(host: str) -> str:
    """The name in a ``Host`` header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[").lower()
    return host.partition(":")[0].lower()
