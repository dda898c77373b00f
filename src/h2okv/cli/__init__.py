"""The command `h2okv`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits with its code."""
    # Imported late, so that Ctrl-C during the slow import of torch is an interrupt, not a trace.
    try:
        from h2okv.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
