"""Runs the command line as `python -m h2okv.cli`."""

from h2okv.cli import main

main()
