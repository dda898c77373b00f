"""Starts and stops the server; options are checked before the model is loaded."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import closing
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from h2okv.console import INTERRUPTED, write_remark, write_text
from h2okv.engine.engine import Engine
from h2okv.engine.llm import AsyncLLM
from h2okv.engine.serving import plan_serving
from h2okv.records import refusing
from h2okv.server.app import guarded, make_app
from h2okv.server.config import ServeRequest, ServerSettings

HEAD_SECONDS = 20.0
"""Seconds in which a client must send the head of a request; then its connection is closed."""
_AFTER_DRAIN = 6.0
"""Seconds for the last answers to be sent, after the engine has stopped."""


def run_server(request: ServeRequest) -> int:
    """Serve until a signal; return the exit code."""
    settings = request.server
    # Open the port first: no other process can take it while the model is loaded.
    with open_port(settings.host, settings.port) as listening_socket:
        request = request.for_model()
        settings = request.server
        engine = AsyncLLM(request.model, config=request.engine, **request.loading)
        engine.engine.verifier.warn = lambda message: write_remark(f"warning: {message}")
        listener = Listener(make_app(engine, settings), engine, settings)
        with listener.capture_signals():  # clients may stop it once the address is printed
            # Clients that connect before it listens wait.
            lines = "\n".join([engine.describe(), *request.notes])
            announce(settings, listening_socket.getsockname()[1], lines)
            listener.run(sockets=[listening_socket])
    return 0


def announce_plan(request: ServeRequest) -> int:
    """Print what would fit, before any weights are loaded; return the exit code."""
    request = request.for_model()
    plan = plan_serving(request.engine, request.model, **request.loading)
    write_text("\n".join([plan.to_text(), *request.notes, ""]))
    return 0


def follow(request: ServeRequest) -> int:
    """Run a shard of the model until the first of ``torchrun``'s processes ends."""
    # The first process gets the signal too, and needs this one to finish running requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    request = request.for_model()
    engine = Engine(request.model, config=request.engine, **request.loading)
    with closing(engine):
        engine.runner.follow()
    return 0


def announce(settings: ServerSettings, port: int, description: str) -> None:
    """Print the model and its settings to stderr, and the address to stdout."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    write_remark(description)
    if not settings.is_local and settings.api_key is None:
        write_remark(
            f"warning: anyone who reaches {host} may use this server; set H2OKV_API_KEY to require"
            " a key."
        )
    write_remark(f"model {settings.model_name!r}; Ctrl-C finishes running requests and stops")
    write_remark(f"chat in a browser: http://{host}:{port}/")
    write_text(f"http://{host}:{port}/v1\n")


def open_port(host: str, port: int) -> socket.socket:
    """Open a port; connections wait until the server accepts them."""
    local = "give an address of this machine, such as 127.0.0.1 or 0.0.0.0."
    with refusing(f"--host {host!r} is not known", local, OSError):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = addresses[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"--port {port} of {host} cannot be opened ({os.strerror(error.errno or 0)}); choose"
            " another one, or --port 0 for any that is free."
        ) from error


class _Connection(H11Protocol):
    """A connection that is closed if it sends half a request's head, or nothing."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        """Set a deadline while no request is answered; further bytes do not move it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Listener(uvicorn.Server):
    """A uvicorn server that stops the engine when it shuts down."""

    # Declared here too, for lint without uvicorn.
    should_exit: bool

    def __init__(self, app: ASGIApp, engine: AsyncLLM, settings: ServerSettings) -> None:
        config = uvicorn.Config(
            guarded(app, settings),
            http=_Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            # uvicorn's default would close the log handlers of other code in this process.
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            # Not trusted: the server uses no client's address.
            proxy_headers=False,
            timeout_graceful_shutdown=int(settings.drain + _AFTER_DRAIN),
        )
        super().__init__(config)
        self._engine, self._drain = engine, settings.drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, finish running requests, and stop the engine."""
        stopping = asyncio.create_task(self._engine.aclose(drain=self._drain))
        await super().shutdown(sockets)
        await stopping

    def handle_exit(self, sig: int, frame: object) -> None:
        """Handle signals: the first one shuts down gracefully, the second one at once."""
        if self.should_exit:
            write_remark("h2okv: stopped before all requests had finished.")
            os._exit(INTERRUPTED)
        self.should_exit = True
