"""The name of the argument by which transformers' models take a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

# transformers 5.24 renamed it, and takes the old name with a warning.
_IS_RENAMED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
CACHE = "cache" if _IS_RENAMED else "past_key_values"
"""What the installed transformers calls it."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a forward's keyword arguments, by either name, or ``None``."""
    cache = arguments.get("cache")
    return arguments.get("past_key_values") if cache is None else cache
