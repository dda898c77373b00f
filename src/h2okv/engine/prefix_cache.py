"""Prefix caching: which states of texts are kept."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from h2okv.prompts.chat_template import Pins

# Beginnings of texts that are remembered without a state: of 100 bytes each.
_MOST_BEGINNINGS = 1 << 16


class PrefixCache:
    """Keys of the states after multiples of `evict_every` tokens, least recently used out.

    Such a state is a function of the text before it (`CacheConfig.evict_every`), so that a prompt
    which begins with the same tokens continues from a copy of it. A key is a digest of these
    tokens and of those pinned among them. The runner holds the states themselves.

    Every state has the size of a budget, so few places of a text get one: the last multiple in a
    prompt; the last in an answer; and where a prompt leaves a text that was read before, for then
    other prompts begin so too (arXiv 2411.19379 admits states of recurrent layers in this way).
    Where answers have thoughts, the states of a conversation's turns follow each other, and of
    those that no other prompt has continued the newest three stay: of an answer, and of the prompt
    and the answer behind it.

    Args:
        span: tokens between two evictions.
        max_bytes: of all states together.
    """

    def __init__(self, span: int, max_bytes: int) -> None:
        self.span, self.max_bytes = span, max_bytes
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
        keys, digest = [], b""
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
        count = max((n for n, key in enumerate(usable, 1) if key in self), default=0)
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
