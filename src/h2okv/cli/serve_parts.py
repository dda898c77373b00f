"""The ranks of a server that hold parts of the model, and have no clients."""

from __future__ import annotations

import os
import signal

from h2okv.cli.serve_run import ServeRequest, engine_options
from h2okv.engine.serving.engine import Engine, EngineSettings


def is_first_rank() -> bool:
    """Tells whether this process, among those of ``torchrun``, has the clients."""
    return os.environ.get("RANK", "0") == "0"


def follow(request: ServeRequest) -> int:
    """Holds a part of the model until the first rank lets go.

    Args:
        request: What the user asked for; the same on all ranks.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If the model, or an option, is at fault.
    """
    # The first rank gets the signal too, and finishes what runs, for which this one is needed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    settings = EngineSettings(**engine_options(request))
    engine = Engine(
        request.model, settings=settings, dtype=request.dtype, device=request.device, in_parts=True
    )
    try:
        engine.follow()
    finally:
        engine.close()
    return 0
