"""Read GGUF files without their long lists: parsing a vocabulary takes minutes and much memory."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_LONG = 4096
_SIZES = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}  # of numbers
_STRING = 8


def _reader_class() -> Any:
    import gguf

    class LeanReader(gguf.GGUFReader):
        """A reader that repeats a list's first value if it is too long for one value per layer."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            if count <= _LONG or kind not in (*_SIZES, _STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            end = orig_offs + 12
            *_, first = super()._get_field_parts(end, kind)[1]
            if kind == _STRING:
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", data, end)[0]
            else:
                end += count * _SIZES[kind]
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
            return end - orig_offs, [first], [0] * count, types

    return LeanReader


def open_lean(path: Path) -> Any:
    """Open a GGUF file as ``gguf.GGUFReader`` does, but without its long lists."""
    return _reader_class()(path)


@contextlib.contextmanager
def lean_transformers() -> Iterator[None]:
    """Make transformers skip long lists too, if it does not read the vocabulary from them."""
    import gguf

    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer  # noqa: F401
    except ImportError:  # earlier releases read the vocabulary from the list
        yield
        return
    with mock.patch.object(gguf, "GGUFReader", _reader_class()):
        yield
