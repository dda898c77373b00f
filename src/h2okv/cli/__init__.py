"""The command `h2okv`."""

from h2okv.cli.app import main

__all__ = ["main"]
