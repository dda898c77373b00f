"""Where caches are while their layer is not computed."""

from __future__ import annotations

from typing import Protocol

from h2okv.cache import H2OCache


class CacheStore(Protocol):
    """Keeps layers of caches somewhere else than the memory that the model computes in."""

    def bring(self, cache: H2OCache, layer_idx: int) -> None:
        """Makes a layer's entries ready for its attention; mutates the cache."""
        ...

    def expect(self, cache: H2OCache, layer_idx: int) -> None:
        """Says which layer is brought next, so that it can be read meanwhile."""
        ...

    def put_back(self, cache: H2OCache, layer_idx: int) -> None:
        """Takes a layer's entries away again, what is new in them kept; mutates the cache."""
        ...

    def forget(self, cache: H2OCache) -> None:
        """Gives back what is held for a cache."""
        ...
