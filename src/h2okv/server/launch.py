"""Starts the server: everything that can be refused is refused before the model is loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2okv.console import write_remark, write_text
from h2okv.engine import AsyncLLM, EngineConfig
from h2okv.engine.engine import Engine
from h2okv.integration.loading import describe
from h2okv.integration.models import BUNDLED
from h2okv.records import read_text_file
from h2okv.server.config import ServerSettings

_NEEDED = ("fastapi", "uvicorn", "pydantic", "openai", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """What the user asked for; see `h2okv serve --help`.

    Attributes:
        model: What `AsyncLLM` takes first.
        server: Address, key and limits.
        engine: Cache, sequences and memory; the prefixes are put in by `engine_config`.
        prefixes: Files with texts that many prompts begin with; their caches are kept.
        systems: Files with system messages of many chats, likewise.
        loading: What `AsyncLLM` takes else: ``dtype``, ``device``.
    """

    model: str = BUNDLED
    server: ServerSettings
    engine: EngineConfig = field(default_factory=EngineConfig)
    prefixes: tuple[Path, ...] = ()
    systems: tuple[Path, ...] = ()
    loading: dict[str, Any] = field(default_factory=dict)

    def engine_config(self) -> EngineConfig:
        """The engine's config with the tokens of all beginnings that are read once and kept."""
        from h2okv.server.errors import ApiError
        from h2okv.server.tokenization import system_prefix, text_prefix

        if not self.prefixes and not self.systems:
            return self.engine
        # Without the line end that editors put last, which no client sends.
        texts = [read_text("prefix", path).rstrip("\n") for path in self.prefixes]
        systems = [read_text("system", path).rstrip("\n") for path in self.systems]
        tokenizer = describe(self.model).tokenizer
        try:
            found = [text_prefix(tokenizer, text) for text in texts]
            found += [system_prefix(tokenizer, text) for text in systems]
        except ApiError as error:
            raise ValueError(f"--system: {error}") from error
        return dataclasses.replace(self.engine, prefixes=found)


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
    # Only now: they import what the extra brings.
    from h2okv.server.app import make_app
    from h2okv.server.listener import Listener, open_port

    settings = request.server
    # Held from now on, so that nothing else takes it while the model is loaded.
    with open_port(settings.host, settings.port) as opened:
        port = opened.getsockname()[1]
        engine = AsyncLLM(request.model, config=request.engine_config(), **request.loading)
        app = make_app(engine, settings)
        Listener(
            app, engine, settings.drain, lambda: announce(settings, port, engine.describe())
        ).run(sockets=[opened])
    return 0


def follow(request: ServeRequest) -> int:
    """Holds a part of the model until the first of ``torchrun``'s processes lets go.

    Args:
        request: What the user asked for; the same in all processes.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If the model, or an option, is at fault.
    """
    # The first process gets the signal too, and finishes what runs, for which this one is needed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    engine = Engine(request.model, config=request.engine_config(), **request.loading)
    try:
        engine.follow()
    finally:
        engine.close()
    return 0


def check_installed() -> None:
    """Refuses to go on without what the extra brings."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a server needs {', '.join(missing)}, not installed here; pip install 'h2okv[serve]'"
        )


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
    write_text(f"http://{host}:{port}/v1\n")


def served_name(model: str) -> str:
    """A path's last name, so that clients do not see where it lies; a Hub id as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def read_text(option: str, path: Path) -> str:
    """Reads the text file of an option."""
    try:
        return read_text_file(path)
    except ValueError as error:
        raise ValueError(f"--{option} {error}") from error
