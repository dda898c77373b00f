"""How a server behaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from h2okv.config import Budget

MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What is decided when the server starts.

    Attributes:
        model_name: What clients call the model.
        budget: Of requests that name none; ``{"h2o": {...}}`` changes parts of it.
        api_key: Asked of every request but ``/health`` and the pages; ``None`` for none.
        hosts: Names that the ``Host`` header may have; ``None`` for any.
        timeout: Seconds that a request may take, waiting included.
        max_body: Bytes of a request's body.
        max_new_tokens: The most new tokens that a request may ask for.
        max_choices: The most outputs of a request: prompts times ``n``.
        view_page: The HTML of a recorded viewer page, served at ``/view``.

    Raises:
        ValueError: If a limit leaves nothing to do.
    """

    model_name: str
    budget: Budget = field(default_factory=Budget)
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    timeout: float = 600.0
    max_body: int = 8 * MEBIBYTE
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
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; set one of some length, or none at all.")
