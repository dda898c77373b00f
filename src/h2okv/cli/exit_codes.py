"""What the command tells the shell."""

from __future__ import annotations

from collections.abc import Sequence

from h2okv.cli.generation import Generation

BAD_INPUT = 2
INTERRUPTED = 130


def exit_code(runs: Sequence[Generation]) -> int:
    """Returns 0 if all runs came to their end, 130 (as shells do for SIGINT) if one did not."""
    return INTERRUPTED if any(run.interrupted for run in runs) else 0
