"""States of texts in the files of a folder, which outlive the process."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from h2okv.cache import H2OCache
from h2okv.cache.checkpoint import read_notes
from h2okv.console import format_bytes
from h2okv.engine.config import DEFAULT_STATES, EngineConfig
from h2okv.engine.memory import release_workers
from h2okv.records import naming

_LOG = logging.getLogger("h2okv.engine")
_NAME = re.compile(r"([0-9a-f]{64})\.safetensors(\.[0-9a-f]+\.tmp)?")
_NOTE, _SIGNATURE = "prefix", "signature"
_KEY_FILE = "key"
_UNSIGNED = "0" * 64
_CHUNK = 1 << 20
_SIGNED = re.compile(rb'signature\\": \\"([0-9a-f]{64})\\"')
"""The signature among the notes, which are JSON in a string of the header."""
_STALE = 3600.0  # seconds after which a draft counts as abandoned


class PrefixFolder:
    """The states of a `PrefixCache` as `H2OCache.save` writes them, least recently used deleted.

    A file is named by its state's key, so that it is read only for the text, weights and options
    that it was written for. It is signed, by a secret in a file that only its user can read, so
    that no file that was copied or changed is used. A thread writes: no step waits for
    the disk. A state that is dropped from memory before its turn is not written.

    Args:
        path: The folder, which is created.
        max_bytes: Of all files together.

    Raises:
        ValueError: If it cannot be written.
    """

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self.path, self.max_bytes = Path(path).expanduser(), max_bytes
        self.num_bytes = self.num_hits = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._refused: set[str] = set()
        self._pending: dict[str, H2OCache] = {}
        self._lock = threading.Lock()  # for the files' sizes, between the two threads
        self._writer = ThreadPoolExecutor(1, "h2okv-states")
        with naming(self.path, "written", "give a folder for prefix_cache_folder that can be"):
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                self._secret = self._read_secret()
                self._list()

    @classmethod
    def of(cls, config: EngineConfig) -> PrefixFolder | None:
        """Return the folder of a config, if it has one.

        Raises:
            ValueError: If it cannot be written.
        """
        if config.prefix_cache_folder is None:
            return None
        # Not less where memory is short for a while: files would be deleted for it.
        return cls(config.prefix_cache_folder, config.prefix_cache or DEFAULT_STATES)

    def _list(self) -> None:
        files, others = [], []
        for entry in os.scandir(self.path):
            match = _NAME.fullmatch(entry.name)
            if entry.name == _KEY_FILE:
                continue
            if match is None or not entry.is_file():
                others.append(entry.name)
            elif match[2] is None:
                status = entry.stat()
                files.append((status.st_mtime_ns, match[1], status.st_size))
            elif entry.stat().st_mtime < time.time() - _STALE:
                os.unlink(entry)
        for _, key, size in sorted(files):
            self._add(key, size)
        if others:
            count, first = len(others), min(others)
            _LOG.warning(
                "'%s' has %d other entries, such as %r, which stay as they are",
                self.path, count, first,
            )  # fmt: skip

    def _read_secret(self) -> bytes:
        """Return the folder's secret; create it in a folder that has none."""
        path = self.path / _KEY_FILE
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            status, secret = os.fstat(file.fileno()), file.read(_CHUNK)
        is_private = os.name != "posix" or (
            status.st_uid == os.geteuid() and not status.st_mode & 0o077
        )
        if not is_private or len(secret) != 32:
            raise ValueError(
                f"'{path}' must be a file of 32 bytes that only you can read (chmod 600), since it"
                " signs the states; delete it and the states, or give another prefix_cache_folder."
            )
        return secret

    def _signature(self, path: Path, key: str, offset: int) -> str:
        """Return the signature of a file for a key, without the bytes of its signature."""
        code = hmac.new(self._secret, key.encode(), hashlib.sha256)
        with path.open("rb") as file:
            code.update(file.read(offset))
            file.seek(len(_UNSIGNED), os.SEEK_CUR)
            while chunk := file.read(_CHUNK):
                code.update(chunk)
        return code.hexdigest()

    @staticmethod
    def _find_signature(path: Path) -> tuple[int, str]:
        """Return where in a file its signature is, and the signature."""
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, _CHUNK * 16))
        matches = [*_SIGNED.finditer(header)]
        if len(matches) != 1:
            raise ValueError(f"'{path}' has no signature.")
        return 8 + matches[0].start(1), matches[0][1].decode()

    def __len__(self) -> int:
        return len(self._sizes)

    def __str__(self) -> str:
        size, limit = format_bytes(self.num_bytes), format_bytes(self.max_bytes)
        return f"'{self.path}' has {len(self):,} states of {size}, up to {limit}"

    def trim(self) -> None:
        """Delete the files beyond the limit; mutates the folder."""
        with self._lock:
            while self.num_bytes > self.max_bytes:
                self._delete(next(iter(self._sizes)))

    def read(self, key: str, length: int, model: Any, like: H2OCache) -> H2OCache | None:
        """Return a state after `length` tokens with the options of `like`; ``None`` for no file."""
        if key not in self._sizes or key in self._refused:
            return None
        path = self._file(key)
        try:
            offset, signature = self._find_signature(path)
            if not hmac.compare_digest(self._signature(path, key, offset), signature):
                raise ValueError(f"'{path}' was not written by this folder's user, or changed.")
            if read_notes(path).get(_NOTE) != key:
                raise ValueError(f"'{path}' holds the state of another text or model.")
            state = H2OCache.load(path, model, like.rule)
            is_same = state.cache_config.identity() == like.cache_config.identity()
            is_same &= state.transforms_keys == like.transforms_keys
            if not is_same or (state.batch_size, state.num_seen_tokens) != (1, length):
                raise ValueError(f"'{path}' holds the state of another text or cache.")
        except Exception as error:  # whatever is wrong with a file, the text can be read again
            self._refused.add(key)
            _LOG.warning("state skipped: %s", " ".join(str(error).split()))
            return None
        self.touch(key)
        self.num_hits += 1
        return state

    def touch(self, key: str) -> None:
        """Note that a state was used; mutates the order of use."""
        with self._lock, suppress(KeyError, OSError):
            self._sizes.move_to_end(key)
            os.utime(self._file(key))

    def write(self, key: str, state: H2OCache) -> None:
        """Write a state soon, which must not change any more. Mutates the folder."""
        self._pending[key] = state
        self._writer.submit(self._write, key)

    def forget(self, key: str) -> None:
        """Write a state no more, which memory has dropped; mutates the folder."""
        with self._lock:
            self._pending.pop(key, None)

    def remove(self, key: str) -> None:
        """Delete a state that is not needed any more; mutates the folder."""
        self.forget(key)
        with self._lock:
            self._delete(key)

    def close(self) -> None:
        """Write what is left to be written."""
        self._writer.shutdown()

    def _write(self, key: str) -> None:
        state = self._pending.get(key)
        if state is None:
            return
        try:
            size = self._save(key, state)
        except Exception as error:  # such as a full disk; the state is still in memory
            self.forget(key)
            _LOG.warning("state not kept: %s", " ".join(str(error).split()))
            return
        finally:
            release_workers()
        with self._lock:
            self._refused.discard(key)
            self._add(key, size)
            if self._pending.pop(key, None) is None:  # removed meanwhile
                self._delete(key)
        self.trim()

    def _save(self, key: str, state: H2OCache) -> int:
        """Write a signed state; return its bytes."""
        draft = self._file(key).with_suffix(f".safetensors.{secrets.token_hex(4)}.tmp")
        try:
            state.save(draft, notes={_NOTE: key, _SIGNATURE: _UNSIGNED})
            offset, _ = self._find_signature(draft)
            signature = self._signature(draft, key, offset)
            with draft.open("r+b") as file:
                file.seek(offset)
                file.write(signature.encode())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._file(key))
        finally:
            draft.unlink(missing_ok=True)
        return self._file(key).stat().st_size

    def _add(self, key: str, size: int) -> None:
        self.num_bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size

    def _delete(self, key: str) -> None:
        if key in self._sizes:
            self.num_bytes -= self._sizes.pop(key)
            with suppress(OSError):
                self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"
