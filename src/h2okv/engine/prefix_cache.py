"""Prefix caching: which states of texts are kept, in memory and in a folder's files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from h2okv.cache import H2OCache
from h2okv.cache.checkpoint import read_notes
from h2okv.console import format_bytes
from h2okv.engine.config import DEFAULT_STATES, EngineConfig
from h2okv.engine.memory import release_workers
from h2okv.prompts.chat_template import Pins
from h2okv.prompts.readers import FieldError
from h2okv.records import naming

# Beginnings of texts that are remembered without a state: of 100 bytes each.
_MOST_BEGINNINGS = 1 << 16


class PrefixCache:
    """Keys of the states after multiples of `evict_every` tokens, least recently used out.

    Such a state is a function of the text before it (`CacheConfig.evict_every`), so that a prompt
    which begins with the same tokens continues from a copy of it. A key is a digest of these
    tokens, of those pinned among them, and of everything else that the state depends on. The
    runner holds the states themselves.

    Every state has the size of a budget, so few places of a text get one: the last multiple in a
    prompt; the last in an answer; and where a prompt leaves a text that was read before, for then
    other prompts begin so too (arXiv 2411.19379 admits states of recurrent layers in this way).
    Where answers have thoughts, the states of a conversation's turns follow each other, and of
    those that no other prompt has continued the newest three stay: of an answer, and of the prompt
    and the answer behind it.

    Args:
        span: tokens between two evictions.
        max_bytes: of all states together.
        identity: what the states depend on besides tokens; JSON.
        load: brings a state of some tokens back by its key, if it can, and calls `add`.
    """

    def __init__(
        self,
        span: int,
        max_bytes: int,
        identity: Any,
        load: Callable[[str, int], bool] = lambda key, length: False,
    ) -> None:
        self.span, self.max_bytes, self._load = span, max_bytes, load
        self._root = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._beginnings: OrderedDict[str, None] = OrderedDict()
        self.num_bytes = self.num_evicted = 0
        # Of a state: the one that its prompt continued from, and the one that followed it; empty
        # where several prompts have continued from it.
        self._before: dict[str, str] = {}
        self._after: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def keys_of(self, tokens: Sequence[int], pins: Pins = ()) -> list[str]:
        """Return the keys of a text's states, one for each whole span.

        Pins are in their order. A pin that begins behind a state does not change it.
        """
        keys, digest = [], self._root
        for end in range(self.span, len(tokens) + 1, self.span):
            first = end - self.span
            span = array("q", tokens[first:end])
            for start, stop in pins:
                if start < end and stop > first:
                    span.extend((max(start, first), min(stop, end)))
            digest = hashlib.sha256(digest + span.tobytes()).digest()
            keys.append(digest.hex())
        return keys

    def match(
        self, tokens: Sequence[int], opening: int | None = None, pins: Pins = ()
    ) -> tuple[int, str | None, dict[int, str]]:
        """Find the longest state that leaves a token to read; mutates the order of use.

        Args:
            tokens: Of a prompt.
            opening: How many at its end later prompts do not have, as they begin thoughts;
                ``None`` where answers have no thoughts.
            pins: Of these tokens, in their order.

        Returns:
            ``(length, key, saves)``: the tokens that the state has read, its key, and the lengths
            at which this prompt's states are to be saved, with their keys.
        """
        keys = self.keys_of(tokens, pins)
        usable = keys[: (len(tokens) - max(1, opening or 0)) // self.span]
        count = len(usable)
        while count and (key := usable[count - 1]) not in self:
            if self._load(key, count * self.span):
                break
            count -= 1
        shared = max((n for n, key in enumerate(keys, 1) if key in self._beginnings), default=0)
        for key in keys:
            self._beginnings[key] = None
            self._beginnings.move_to_end(key)
        while len(self._beginnings) > _MOST_BEGINNINGS:
            self._beginnings.popitem(last=False)
        counts = {shared, len(usable)}  # the same prompt may come again
        saves = {n * self.span: keys[n - 1] for n in counts if n > count}
        if count < shared < len(usable):
            self._after[keys[shared - 1]] = ""
        if count == 0:
            return 0, None, saves
        if opening is not None and count < len(usable):
            key, newest = keys[count - 1], keys[len(usable) - 1]
            self._before[newest] = key
            if self._after.setdefault(key, newest) != newest:
                self._after[key] = ""
        self._sizes.move_to_end(keys[count - 1])
        return count * self.span, keys[count - 1], saves

    def add(self, key: str, num_bytes: int) -> list[str]:
        """Note a saved state; return the keys of those that are to be dropped for it."""
        self._beginnings[key] = None
        self.remove(key)
        self._sizes[key] = num_bytes
        self.num_bytes += num_bytes
        before = self._before.get(self._before.get(key, ""), "")
        earlier = self._before.get(before, "")
        dropped = []
        if self._after.get(earlier) == before and self.remove(earlier):
            dropped.append(earlier)
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._sizes))
            self.remove(oldest)
            self.num_evicted += 1
            dropped.append(oldest)
        return dropped

    def remove(self, key: str) -> bool:
        """Forget a state; return whether there was one."""
        size = self._sizes.pop(key, None)
        if size is not None:
            self._before.pop(key, None)
            self._after.pop(key, None)
        self.num_bytes -= size or 0
        return size is not None

    def stats(self) -> dict[str, int]:
        """Return the fields of `EngineStats` that are about states."""
        return {
            "prefix_states": len(self),
            "prefix_bytes": self.num_bytes,
            "prefix_evictions": self.num_evicted,
        }


_LOG = logging.getLogger("h2okv.engine")
_NAME = re.compile(r"([0-9a-f]{64})\.safetensors(\.[0-9a-f]+\.tmp)?")
_STALE = 3600.0  # seconds after which a draft counts as abandoned
_NOTE = "key"


class PrefixFolder:
    """The states of a `PrefixCache` as `H2OCache.save` writes them, least recently used deleted.

    A file is named by its state's key, so that it is read only for the text, weights and options
    that it was written for; the folder must be one that its user alone can write to. A thread
    changes it: no step waits for the disk. A state that is dropped from memory before its turn is
    not written.

    Args:
        path: The folder, which is created.
        max_bytes: Of all files together.

    Raises:
        ValueError: If it cannot be written, or others can write to it.
    """

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self.path, self.max_bytes = Path(path).expanduser(), max_bytes
        self.num_bytes = self.num_hits = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._pending: dict[str, H2OCache] = {}
        self._writer = ThreadPoolExecutor(1, "h2okv-states")
        with naming(self.path, "written", "give a folder for prefix_cache_folder that can be"):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                self._list()
            status = self.path.stat()
        if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & 0o002):
            problem = (
                f" '{self.path}' must be yours, and not writable for everyone, as answers continue"
                " from its states; change that (chmod 700), or give another"
            )
            raise FieldError(("prefix_cache_folder",), problem)

    @classmethod
    def of(cls, config: EngineConfig) -> PrefixFolder | None:
        """Return the folder of a config, if it has one.

        Raises:
            ValueError: If it cannot be written, or others can write to it.
        """
        if config.prefix_cache_folder is None:
            return None
        # Not less where memory is short for a while: files would be deleted for it.
        return cls(config.prefix_cache_folder, config.prefix_cache or DEFAULT_STATES)

    def _list(self) -> None:
        files, others = [], []
        for entry in os.scandir(self.path):
            match, status = _NAME.fullmatch(entry.name), entry.stat()
            if match is None or not entry.is_file():
                others.append(entry.name)
            elif match[2] is None:
                files.append((status.st_mtime_ns, match[1], status.st_size))
            elif status.st_mtime < time.time() - _STALE:
                os.unlink(entry)
        for _, key, size in sorted(files):
            self._add(key, size)
        if others:
            _LOG.warning(
                "'%s' has %d other entries, such as %r, which stay as they are",
                self.path, len(others), min(others),
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._sizes)

    def __str__(self) -> str:
        size, limit = format_bytes(self.num_bytes), format_bytes(self.max_bytes)
        return f"'{self.path}' has {len(self):,} states of {size}, up to {limit}"

    def trim(self) -> None:
        """Delete the files beyond the limit; mutates the folder."""
        while self.num_bytes > self.max_bytes:
            self._delete(next(iter(self._sizes)))

    def read(self, key: str, length: int, model: Any, like: H2OCache) -> H2OCache | None:
        """Return a state after `length` tokens with the options of `like`; ``None`` for no file."""
        if key not in self._sizes:
            return None
        path = self._file(key)
        try:
            state = H2OCache.load(path, model, like.rule)
            is_same = state.cache_config.identity() == like.cache_config.identity()
            is_same &= state.transforms_keys == like.transforms_keys
            is_same &= read_notes(path).get(_NOTE) == key  # else it was renamed
            if not is_same or (state.batch_size, state.num_seen_tokens) != (1, length):
                raise ValueError(f"'{path}' holds the state of another text or cache.")
        except Exception as error:  # whatever is wrong with a file, the text can be read again
            self.remove(key)
            _LOG.warning("state skipped: %s", " ".join(str(error).split()))
            return None
        self.touch(key)
        self.num_hits += 1
        return state

    def touch(self, key: str) -> None:
        """Note soon that a state was used; mutates the order of use."""
        self._writer.submit(self._touch, key)

    def write(self, key: str, state: H2OCache) -> None:
        """Write a state soon, which must not change any more. Mutates the folder."""
        self._pending[key] = state
        self._writer.submit(self._write, key)

    def forget(self, key: str) -> None:
        """Write a state no more, which memory has dropped; mutates the folder."""
        self._pending.pop(key, None)

    def remove(self, key: str) -> None:
        """Delete a state soon, which is not needed any more; mutates the folder."""
        self.forget(key)
        self._writer.submit(self._delete, key)

    def close(self) -> None:
        """Write what is left to be written."""
        self._writer.shutdown()

    def _touch(self, key: str) -> None:
        with suppress(KeyError, OSError):
            self._sizes.move_to_end(key)
            os.utime(self._file(key))

    def _write(self, key: str) -> None:
        state, path = self._pending.pop(key, None), self._file(key)
        if state is None:
            return
        try:
            state.save(path, notes={_NOTE: key})
            self._add(key, path.stat().st_size)
        except Exception as error:  # such as a full disk; the state is still in memory
            _LOG.warning("state not kept: %s", " ".join(str(error).split()))
        finally:
            release_workers()
        self.trim()

    def _add(self, key: str, size: int) -> None:
        self.num_bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size

    def _delete(self, key: str) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)
        with suppress(OSError):
            self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"
