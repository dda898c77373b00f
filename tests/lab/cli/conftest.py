"""The tiny model and the command of tests/cli."""

from cli.conftest import *  # noqa: F403
