"""Run the command line as `python -m h2okv`."""

from h2okv.cli import main

main()
