"""Where caches are while their layer is not computed."""

from __future__ import annotations

from typing import Protocol

from h2okv.cache import H2OCache


class CacheStore(Protocol):
    """Keeps layers of caches somewhere else than the memory that the model computes in."""

    def bring(self, cache: H2OCache, layer_idx: int) -> None:
        """Makes a layer's entries ready; mutates the cache.

        Args:
            cache: Whose.
            layer_idx: The layer.
        """
        ...

    def expect(self, cache: H2OCache, layer_idx: int) -> None:
        """Says which layer is brought next, so that it can be read meanwhile.

        Args:
            cache: Whose.
            layer_idx: The layer; one that does not exist is ignored.
        """
        ...

    def put_back(self, cache: H2OCache, layer_idx: int, is_new: bool = False) -> None:
        """Takes a layer's entries away again; mutates the cache.

        Args:
            cache: Whose.
            layer_idx: The layer.
            is_new: Whether rows have changed places, so that all of it is written.
        """
        ...

    def forget(self, cache: H2OCache) -> None:
        """Gives back what is held for a cache.

        Args:
            cache: Whose.
        """
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...
