"""Starts the server: port, signals, shutdown."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvicorn
from fastapi import FastAPI

from h2okv.config import Budget
from h2okv.console import write_remark, write_text
from h2okv.engine.engine import EngineSettings
from h2okv.engine.llm import AsyncLLM
from h2okv.integration.loading import describe
from h2okv.integration.models import BUNDLED
from h2okv.server.config import ServedEngine

if TYPE_CHECKING:
    from h2okv.server.config import ServerSettings


LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AFTER_DRAIN = 5.0
"""Seconds for the last answers to be sent, after the engine has stopped."""
_QUIT = 130


def open_port(host: str, port: int) -> socket.socket:
    """Takes a port, without accepting connections yet."""
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

    def __init__(self, app: FastAPI, engine: ServedEngine, drain: float = 30.0) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            backlog=_BACKLOG,
            server_header=False,
            # None of it is trusted: the server looks at no client's address.
            proxy_headers=False,
        )
        super().__init__(config)
        self.should_exit: bool = False
        self._engine, self._drain = engine, drain
        self.on_started: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets)
        self.on_started()

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


_NEEDED = ("fastapi", "uvicorn", "pydantic", "openai", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """What the user asked for; see `h2okv serve --help`.

    Attributes:
        model: What `resolve_model` takes.
        name: What clients call it; ``None`` for its own name.
        host: The address to listen at.
        port: The port; 0 for any.
        budget: Of requests that name none.
        cache: Further options of the cache.
        rows: Requests that generate together; ``None`` for as many as fit.
        memory: Bytes that may be taken; ``None`` for most of what is free.
        max_prompt: Tokens of the longest prompt; ``None`` for the model's context.
        max_waiting: Requests that may wait.
        piece: Tokens of a prompt between two steps.
        prompt_share: Share of the time for prompts while others generate.
        max_new_tokens: The most new tokens of an output.
        max_choices: The most outputs of a request.
        max_body: Bytes of a request's body.
        timeout: Seconds that a request may take.
        drain: Seconds for what runs when the server ends.
        prefixes: Files with texts that many prompts begin with; their caches are kept.
        systems: Files with system messages of many chats, likewise.
        view_page: A recorded page to serve.
        dtype: Of the weights; ``None`` for the checkpoint's own.
        device: Where the model runs.
        api_key: What clients must send; ``None`` for nothing.
        in_parts: Whether each process that ``torchrun`` has started holds a part of the model.
    """

    model: str = BUNDLED
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    budget: Budget = field(default_factory=Budget)
    cache: dict[str, Any] = field(default_factory=dict)
    rows: int | None = None
    memory: int | None = None
    max_prompt: int | None = None
    max_waiting: int = 256
    piece: int = 512
    prompt_share: float = 0.8
    max_new_tokens: int = 4096
    max_choices: int = 128
    max_body: int = 8 << 20
    timeout: float = 600.0
    drain: float = 30.0
    prefixes: tuple[Path, ...] = ()
    systems: tuple[Path, ...] = ()
    view_page: Path | None = None
    dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    api_key: str | None = None
    in_parts: bool = False


def run_server(request: ServeRequest) -> int:
    """Serves until a signal.

    Args:
        request: What the user asked for.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If an option, the model, a file or the port is at fault.
    """
    check_installed()
    # Only now: it imports what the extra brings.
    from h2okv.server.app import make_app

    settings = settings_of(request)
    is_local = request.host in LOOPBACK
    # Mistakes show before the model is loaded, but nobody is let in yet.
    open_port(request.host, request.port).close()
    engine = _engine(request)
    app = make_app(engine, settings)
    opened = open_port(request.host, request.port)
    shown = f"[{request.host}]" if ":" in request.host else request.host
    address = f"http://{shown}:{opened.getsockname()[1]}"
    listener = Listener(app, engine, request.drain)

    def announce() -> None:
        write_remark(engine.describe())
        if not is_local and request.api_key is None:
            write_remark(
                f"warning: whoever reaches {shown} may use this server; set H2OKV_API_KEY to ask"
                " for a key."
            )
        write_remark(f"model {settings.model_name!r}; Ctrl-C finishes what runs and ends")
        write_text(f"{address}/v1\n")

    listener.on_started = announce
    listener.run(sockets=[opened])
    return 0


def check_installed() -> None:
    """Refuses to go on without what the extra brings."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a server needs {', '.join(missing)}, not installed here; pip install 'h2okv[serve]'"
        )


def settings_of(request: ServeRequest) -> ServerSettings:
    """What the application needs to know; checks the options that it is made of."""
    from h2okv.server.config import ServerSettings

    if not 0 <= request.drain < float("inf"):
        raise ValueError(f"--drain {request.drain:g} is out of range; give seconds, 0 or more.")
    is_local = request.host in LOOPBACK
    return ServerSettings(
        model_name=request.name or _name_of(request.model),
        budget=request.budget,
        api_key=request.api_key,
        # A page elsewhere that points its own name at this machine must not get in.
        hosts=frozenset(LOOPBACK) if is_local and request.api_key is None else None,
        timeout=request.timeout,
        max_body=request.max_body,
        max_new_tokens=request.max_new_tokens,
        max_choices=request.max_choices,
        view_page=None if request.view_page is None else _read("view-page", request.view_page),
    )


def _engine(request: ServeRequest) -> AsyncLLM:
    """Loads the model and lays out the rows."""
    return AsyncLLM(
        request.model,
        dtype=request.dtype,
        device=request.device,
        in_parts=request.in_parts,
        **engine_options(request),
    )


def engine_options(request: ServeRequest) -> dict[str, Any]:
    """What `AsyncLLM` is told of the rows, checked; reads the files of prefixes."""
    options: dict[str, Any] = {
        "heavy": request.budget.heavy,
        "recent": request.budget.recent,
        "sink": request.budget.sink,
        "rows": request.rows,
        "memory": request.memory,
        "max_prompt_tokens": request.max_prompt,
        "max_waiting": request.max_waiting,
        "piece_tokens": request.piece,
        "prompt_share": request.prompt_share,
        "prefixes": _prefixes(request),
        "cache": request.cache,
    }
    EngineSettings(**options)
    return options


def _prefixes(request: ServeRequest) -> list[tuple[int, ...]]:
    """The tokens of all beginnings that are read once and kept."""
    from h2okv.server.errors import ApiError
    from h2okv.server.tokenization import system_prefix, text_prefix

    if not request.prefixes and not request.systems:
        return []
    # Without the line end that editors put last, which no client sends.
    texts = [_read("prefix", path).rstrip("\n") for path in request.prefixes]
    systems = [_read("system", path).rstrip("\n") for path in request.systems]
    tokenizer = describe(request.model).tokenizer
    try:
        found = [text_prefix(tokenizer, text) for text in texts]
        return found + [system_prefix(tokenizer, text) for text in systems]
    except ApiError as error:
        raise ValueError(f"--system: {error}") from error


def _name_of(model: str) -> str:
    """A path's last name, so that clients do not see where it lies; a Hub id as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"--{option} '{path}' cannot be read ({reason}); give a text file.") from (
            error
        )
