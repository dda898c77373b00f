"""A short name for a content."""

from __future__ import annotations

import hashlib


def digest(content: str) -> str:
    """Names a text, so that results are gone on with on the same one only.

    Args:
        content: The text.

    Returns:
        Sixteen hexadecimal digits.
    """
    return hashlib.sha256(content.encode("utf-8")).hexdigest()[:16]
