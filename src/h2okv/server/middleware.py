"""Host, key and size of a request, checked before anything of it is read."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from fastapi.security import HTTPBearer
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2okv.server.config import ServerSettings
from h2okv.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/", "/view"})
"""What needs no key: whether the server lives, and pages, which browsers ask for without one."""

_LINGER = 2.0
"""Seconds in which the rest of a body that is too large is thrown away."""


class BodyTooLargeError(Exception):
    """A body came without its length, and went on and on."""


class RequestGuard:
    """Refuses requests by their head, and bodies by their size; pure ASGI.

    Starlette's own check of the host answers in plain text, and would not count bytes.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings
        self._bearer = HTTPBearer(auto_error=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refused request itself, and hands on the others."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = await self._refusal(Request(scope))
        if refusal is not None:
            await _refuse(refusal, scope, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, self._limited(receive), sending)
        except BodyTooLargeError:
            if not started:
                await _refuse(self._too_large(), scope, receive, send)

    async def _refusal(self, request: Request) -> ApiError | None:
        """The error in a request's head, if there is one."""
        host, allowed = request.headers.get("host", ""), self.settings.allowed_hosts
        if allowed is not None and _host_name(host) not in allowed:
            return ApiError(
                403,
                f"Host {host!r} is not this server's; use its own address, or start it with an API"
                " key (H2OKV_API_KEY), which takes requests under any name.",
                code="wrong_host",
            )
        if request.url.path not in OPEN_PATHS and not await self._has_key(request):
            return ApiError(
                401,
                "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.settings.max_body:
            return self._too_large()
        return None

    async def _has_key(self, request: Request) -> bool:
        if self.settings.api_key is None:
            return True
        given = await self._bearer(request)
        if given is None:
            return False
        # As bytes: headers are read as Latin-1, whatever the client meant. In constant time, so
        # that the time tells nothing of how much of a guess is right.
        sent = given.credentials.strip().encode("latin-1")
        return secrets.compare_digest(sent, self.settings.api_key.strip().encode())

    def _limited(self, receive: Receive) -> Receive:
        """Receives no more than may come."""
        left = self.settings.max_body

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise BodyTooLargeError
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self.settings.max_body} bytes; send less, or start the server"
            " with a larger --max-body.",
            code="body_too_large",
        )


async def _refuse(refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, then lets the client finish sending for a while, or it would not see the answer."""

    async def sending(message: Message) -> None:
        # The answer stays open while the rest of the body comes.
        await send({**message, "more_body": True} if "body" in message else message)

    await refusal.response(connection="close")(scope, receive, sending)
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _host_name(host: str) -> str:
    """The name in a ``Host`` header, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()
