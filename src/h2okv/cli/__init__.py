"""The command `h2okv`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits with its code."""
    from h2okv.cli.app import run

    sys.exit(run(sys.argv[1:]))
