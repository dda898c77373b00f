"""What measures a model, for a cache that may not import it: imports go down only.

The package registers both when it is imported (`h2okv/__init__.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Measure = Callable[..., Any]
_MEASURES: dict[str, Measure] = {}


def register_measure(name: str, measure: Measure) -> None:
    """Let `measure` be what is called by this name; mutates the registry."""
    _MEASURES[name] = measure


def measured(name: str, *args: Any) -> Any:
    """Return what the measure of this name returns: ``"budgets"`` or ``"keys"``."""
    return _MEASURES[name](*args)
