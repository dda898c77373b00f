"""Readers of options' values, which raise ValueError with the option's name for invalid ones."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2okv.prompts import readers as fields
from h2okv.records import read_text_file

if TYPE_CHECKING:
    import torch

_DEVICES = re.compile(r"auto|(cpu|cuda|hpu|mps|mtia|npu|xla|xpu)(:\d+)?")
_UNITS = {"": 1, "b": 1, **{u: 1000**n for n, u in enumerate(("kb", "mb", "gb", "tb"), 1)}}
_UNITS |= {u: 1024**n for n, u in enumerate(("kib", "mib", "gib", "tib"), 1)}


def of_field(read: fields.Reader) -> Callable[[str, Any], Any]:
    """Return the reader of an option from that of a request's field."""
    return lambda option, value: read(value, (option,))


count = of_field(fields.integer(1))
port = of_field(fields.integer(0, 65535))
share = of_field(fields.share)


def choice(*words: str) -> Callable[[str, Any], Any]:
    """Return the reader of one of a few words."""
    return of_field(fields.one_of(*words))


def bits(option: str, number: int, allowed: int) -> int:
    """Read a number of bits."""
    if number != allowed:
        raise ValueError(f"{option} {number} is not known; give {allowed}, or leave it out")
    return number


def verify(option: str, text: str) -> bool | str:
    """Read whether answers are read again, and repaired."""
    if text not in ("", "answer", "repair", "repair_all"):  # nothing; the option alone; its values
        choices = f"{option} repair, {option} repair_all or {option} alone"
        raise ValueError(f"{option} {text!r} is not known; give {choices}")
    return text == "answer" or text or False


def names(option: str, text: str) -> tuple[str, ...]:
    """Read a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def memory(option: str, text: str, minimum: int = 1) -> int:
    """Read an amount of memory, of at least 0 or 1 bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is not None and match[2] in _UNITS:
        amount = int(float(match[1]) * _UNITS[match[2]])
        if amount >= minimum:
            return amount
    raise ValueError(f"{option} {text!r} is not an amount of memory; give one such as 8GiB")


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the data type of a name; ``None``, the checkpoint's own, for auto."""
    if name == "auto":
        return None
    import torch

    return getattr(torch, name)


def device(option: str, text: str) -> str:
    """Check the spelling of a device, without torch, so not whether it exists."""
    if not _DEVICES.fullmatch(text):
        remedy = "choose auto, cpu or a GPU that torch can see, such as cuda:0"
        raise ValueError(f"{option} {text!r} is not known; {remedy}")
    return text


def readable(option: str, path: Path) -> Path:
    """Return the path of a file, expanded; raise ValueError unless it can be read."""
    expanded = path.expanduser()
    if str(path) == "-":
        reason = "standard input is not a file"
    elif expanded.is_dir():
        reason = "it is a folder"
    elif not expanded.exists():
        reason = "there is no such file"
    elif not os.access(expanded, os.R_OK):
        reason = "permission denied"
    else:
        return expanded
    raise ValueError(f"{option} '{path}' cannot be read ({reason}); give an existing file")


def writable(option: str, path: Path) -> Path:
    """Raise ValueError, before the work, for a file that cannot be written."""
    if str(path) == "-":
        reason = "standard output is not a file"
    elif path.exists() and not path.is_file():
        reason = "it is a folder" if path.is_dir() else "it is not a file"
    elif not path.parent.is_dir():
        reason = "its folder does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    else:
        return path
    raise ValueError(f"{option} '{path}' cannot be written ({reason}); choose another file")


def text_or_file(option: str, text: str) -> str:
    """Return a text, or that of a file: @FILE, or a value that names a file."""
    name = text.removeprefix("@")
    is_path = re.fullmatch(r"\S*/\S*|\S+\.\w{1,8}", name) is not None
    with suppress(OSError, ValueError):  # a long text cannot name a file
        is_path = is_path or Path(name).expanduser().is_file()
    if not (text.startswith("@") or is_path):
        return text
    return read_text(option, readable(option, Path(name)))


def read_text(option: str, path: Path) -> str:
    """Return the text of an option's file, without the last line break."""
    try:
        return read_text_file(path).rstrip("\r\n")
    except ValueError as error:
        raise ValueError(f"{option} {error}") from error
