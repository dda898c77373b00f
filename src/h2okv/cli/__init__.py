"""The command `h2okv`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; Ctrl-C while it is imported ends it with one line too."""
    try:
        from h2okv.cli import app
    except KeyboardInterrupt:
        print("h2okv: interrupted.", file=sys.stderr)
        sys.exit(130)
    app.main()
