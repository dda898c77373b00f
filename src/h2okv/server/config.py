"""Settings of the server; imports nothing of the extra."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from h2okv.config import CacheConfig
from h2okv.engine.config import EngineConfig
from h2okv.prompts.readers import check_settings, integer, number

_ORIGIN = re.compile(r"https?://[^/\s?#*]+")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server, fixed when it starts."""

    model_name: str  # what clients call the model
    cache: CacheConfig = field(default_factory=CacheConfig)  # of requests that name none
    host: str = "127.0.0.1"
    port: int = 8000  # 0 for any that is free
    api_key: str | None = None  # required for all paths but /health and the page
    timeout: float = 600.0  # seconds that a request may take, waiting included
    drain: float = 30.0  # seconds for running requests to finish when the server stops
    max_body: int = 8 << 20  # bytes of a request's body
    max_new_tokens: int = 4096
    cors_origins: tuple[str, ...] = ()  # sites whose pages may send requests; "*" for all
    log_requests: bool = False  # one line on stderr for each request
    pin: tuple[str, ...] = ()  # messages of every chat that are never evicted

    def __post_init__(self) -> None:
        counts = ("max_body", "max_new_tokens")
        check_settings(self, dict.fromkeys(counts, integer(1)))
        check_settings(self, {"timeout": number(1e-3, 1e9), "drain": number(0, 1e9)})
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--cors-origin {origin!r} is not an origin; give a scheme and a host, such as"
                    " https://example.org or http://localhost:3000, or * for all."
                )
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; set a non-empty one, or leave it unset.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """Options of the command; see `h2okv serve --help`."""

    model: str
    server: ServerSettings
    engine: EngineConfig = field(default_factory=EngineConfig)
    loading: dict[str, Any] = field(default_factory=dict)  # further arguments of `AsyncLLM`
    notes: tuple[str, ...] = ()  # lines about the options, for the user

    def for_model(self) -> ServeRequest:
        """Return the request with the budget that the model's prompts get."""
        from h2okv.engine.serving import in_tokens

        engine, note = in_tokens(self.engine, self.model)
        if note is None:
            return self
        server = replace(self.server, cache=engine.cache)
        return replace(self, engine=engine, server=server, notes=(*self.notes, note))
