"""How many examples hypothesis tries: a few while one works, all of them in `make test-all`."""

import os

QUICK = 25


def examples(count: int, quick: int = QUICK) -> int:
    """Return the count of the full run, or fewer in the quick one."""
    return count if os.environ.get("H2OKV_TESTS") == "all" else min(count, quick)
