"""Starts and ends the server: what can be refused is refused before the model is loaded."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import closing

import uvicorn
from starlette.types import ASGIApp

from h2okv.console import INTERRUPTED, write_remark, write_text
from h2okv.engine.engine import Engine
from h2okv.engine.llm import AsyncLLM
from h2okv.records import refusing
from h2okv.server.app import guarded, make_app
from h2okv.server.config import ServeRequest, ServerSettings

_AFTER_DRAIN = 6.0
"""Seconds for the last answers to be sent, after the engine has stopped."""


def run_server(request: ServeRequest) -> int:
    """Serves until a signal; returns the exit code."""
    settings = request.server
    # Held from now on, so that nothing else takes it while the model is loaded.
    with open_port(settings.host, settings.port) as opened:
        engine = AsyncLLM(request.model, config=request.engine_config(), **request.loading)
        listener = Listener(make_app(engine, settings), engine, settings)
        with listener.capture_signals():  # whoever has read the address may end it
            # Whoever connects before it listens waits.
            announce(settings, opened.getsockname()[1], engine.describe())
            listener.run(sockets=[opened])
    return 0


def follow(request: ServeRequest) -> int:
    """Holds a part of the model until the first of ``torchrun``'s processes lets go."""
    # The first process gets the signal too, and finishes what runs, for which this one is needed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    engine = Engine(request.model, config=request.engine_config(), **request.loading)
    with closing(engine):
        engine.runner.follow()
    return 0


def announce(settings: ServerSettings, port: int, description: str) -> None:
    """Says what is served to whom, and at last, on stdout, the address."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    write_remark(description)
    if not settings.is_local and settings.api_key is None:
        write_remark(
            f"warning: whoever reaches {host} may use this server; set H2OKV_API_KEY to ask for a"
            " key."
        )
    write_remark(f"model {settings.model_name!r}; Ctrl-C finishes what runs and ends")
    write_remark(f"chat in a browser: http://{host}:{port}/")
    write_text(f"http://{host}:{port}/v1\n")


def open_port(host: str, port: int) -> socket.socket:
    """Takes a port; who connects waits until something accepts."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port} is out of range; give 0 (any that is free) to 65535.")
    local = "give an address of this machine, such as 127.0.0.1 or 0.0.0.0."
    with refusing(f"--host {host!r} is not known", local, OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"--port {port} of {host} cannot be opened ({os.strerror(error.errno or 0)}); choose"
            " another one, or --port 0 for any that is free."
        ) from error


class Listener(uvicorn.Server):
    """A uvicorn server that stops the engine with it."""

    # Said here too, for lint runs where uvicorn is not installed.
    should_exit: bool

    def __init__(self, app: ASGIApp, engine: AsyncLLM, settings: ServerSettings) -> None:
        config = uvicorn.Config(
            guarded(app, settings),
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            # Its own configuration would close the handlers of whatever else runs in this process.
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            # None of it is trusted: the server looks at no client's address.
            proxy_headers=False,
            timeout_graceful_shutdown=int(settings.drain + _AFTER_DRAIN),
        )
        super().__init__(config)
        self._engine, self._drain = engine, settings.drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts nothing more, finishes what runs, and stops the engine."""
        stopping = asyncio.create_task(self._engine.aclose(drain=self._drain))
        await super().shutdown(sockets)
        await stopping

    def handle_exit(self, sig: int, frame: object) -> None:
        """Takes signals: the first ends the server in order, the second at once."""
        if self.should_exit:
            write_remark("h2okv: stopped before all requests had finished.")
            os._exit(INTERRUPTED)
        self.should_exit = True
