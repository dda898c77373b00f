"""What the command tells the shell."""

from __future__ import annotations

from h2okv.cli.comparison import Comparison

BAD_INPUT = 2
INTERRUPTED = 130


def exit_code(comparison: Comparison) -> int:
    """Returns 0 if all came to its end, 130 (as shells do for SIGINT) if Ctrl-C ended it."""
    return INTERRUPTED if comparison.interrupted else 0
