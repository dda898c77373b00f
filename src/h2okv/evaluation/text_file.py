"""A text file, with one sentence for whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path


def read_text_file(path: Path) -> str:
    """Reads a text file.

    Args:
        path: The file.

    Returns:
        The text, without a byte-order mark.

    Raises:
        ValueError: If it cannot be read, is not UTF-8, or holds nothing but space.
    """
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"'{path}' cannot be read ({reason}); give a text file") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{path}' is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from error
    if not text.strip():
        raise ValueError(f"'{path}' is empty; give a file with some text")
    return text.removeprefix("\ufeff")
