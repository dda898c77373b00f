"""A name that nobody knows, with the nearest ones that are known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """Makes the error for an unknown name.

    Args:
        what: What it should be the name of.
        name: What was given.
        known: All names.

    Returns:
        The error, to be raised.
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"{what} {name!r} is unknown; {hint}choose from {', '.join(names)}")
