"""The server's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from h2okv.config import Budget

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything about the server that is decided when it starts.

    Attributes:
        model_name: What clients call the model.
        budget: Of requests that name none; ``{"h2o": {...}}`` changes parts of it.
        host: The address to listen at.
        port: The port; 0 for any that is free.
        api_key: Asked of every request but ``/health`` and the pages; ``None`` for none.
        timeout: Seconds that a request may take, waiting included.
        drain: Seconds that running requests have when the server ends.
        max_body: Bytes of a request's body.
        max_new_tokens: The most new tokens that a request may ask for.
        max_choices: The most outputs of a request: prompts times ``n``.
        view_page: The HTML of a recorded viewer page, served at ``/view``.
    """

    model_name: str
    budget: Budget = field(default_factory=Budget)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    timeout: float = 600.0
    drain: float = 30.0
    max_body: int = 8 << 20
    max_new_tokens: int = 4096
    max_choices: int = 128
    view_page: str | None = None

    def __post_init__(self) -> None:
        """Checks all limits."""
        for name in ("timeout", "max_body", "max_new_tokens", "max_choices"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is too little; give more than 0.")
        if not math.isfinite(self.timeout):
            raise ValueError(f"timeout={self.timeout!r} is no time; give a number of seconds.")
        if not 0 <= self.drain < math.inf:
            raise ValueError(f"--drain {self.drain:g} is out of range; give seconds, 0 or more.")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; set one of some length, or none at all.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK

    @property
    def allowed_hosts(self) -> tuple[str, ...] | None:
        """Names that the ``Host`` header may have; ``None`` for any."""
        # A page elsewhere that points its own name at this machine must not get in.
        return LOOPBACK if self.is_local and self.api_key is None else None
