"""What an engine is doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; counters only grow.

    Attributes:
        rows: Rows of the cache.
        rows_in_use: Of these, taken by requests.
        waiting: Requests that have not begun.
        prompt_tokens: Counter: tokens of prompts that were read, without reused ones.
        reused_tokens: Counter: tokens of prompts that came from a saved prefix.
        new_tokens: Counter: tokens that were generated.
        finished: Counter: requests that ended well.
        failed: Counter: requests that ended with an error.
        aborted: Counter: requests whose client went away.
        steps: Counter: decode steps.
        evictions: Counter: entries evicted, of one layer and one KV head.
        cache_bytes: Bytes of the entries that are held now.
        full_bytes: Bytes that a full cache would hold for the same tokens.
        reserved_bytes: Bytes of all rows, in use or not.
    """

    rows: int
    rows_in_use: int
    waiting: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    finished: int
    failed: int
    aborted: int
    steps: int
    evictions: int
    cache_bytes: int
    full_bytes: int
    reserved_bytes: int
