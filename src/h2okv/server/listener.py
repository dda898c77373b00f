"""The port, signals, and the end of the server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

if TYPE_CHECKING:
    from h2okv.engine.llm import AsyncLLM

_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AFTER_DRAIN = 5.0
"""Seconds for the last answers to be sent, after the engine has stopped."""
_QUIT = 130


def open_port(host: str, port: int) -> socket.socket:
    """Takes a port; who connects waits until something accepts."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port} is out of range; give 0 (any that is free) to 65535.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"--host {host!r} is not known ({error.strerror or error}); give an address of this"
            " machine, such as 127.0.0.1 or 0.0.0.0."
        ) from error
    family, kind, protocol, _, address = found[0]
    opened = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # So that a server can be started again at once, while old connections fade away.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        # Two sockets may be bound to one port, but only one of them can listen.
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        raise ValueError(
            f"--port {port} of {host} cannot be opened ({error.strerror}); choose another one, or"
            " --port 0 for any that is free."
        ) from error
    return opened


class Listener(uvicorn.Server):
    """A uvicorn server that stops the engine with it."""

    def __init__(
        self, app: ASGIApp, engine: AsyncLLM, drain: float, on_started: Callable[[], None]
    ) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            # Its own configuration would close the handlers of whatever else runs in this process.
            log_config=None,
            log_level="warning",
            access_log=False,
            backlog=_BACKLOG,
            server_header=False,
            # None of it is trusted: the server looks at no client's address.
            proxy_headers=False,
        )
        super().__init__(config)
        self.should_exit: bool = False
        self._engine, self._drain, self._on_started = engine, drain, on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts nothing more, finishes what runs, and stops the engine."""
        stopping = asyncio.create_task(self._engine.aclose(drain=self._drain))
        self.config.timeout_graceful_shutdown = int(self._drain + _AFTER_DRAIN) + 1
        await super().shutdown(sockets)
        await stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes signals: the first ends the server in order, the second at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.should_exit:
            print("h2okv: stopped before all requests had finished.", file=sys.stderr, flush=True)
            os._exit(_QUIT)
        self.should_exit = True
