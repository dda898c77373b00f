"""One block of the contract in several forwards: eviction waits for the last of them."""

from __future__ import annotations

from h2okv.cache.h2o_cache import H2OCache
from h2okv.cache.slots import SlotLayer
from h2okv.cache.window_slots import is_window_layer


def can_take_pieces(cache: H2OCache) -> bool:
    """Tells whether a block may come in several forwards without being another block.

    Args:
        cache: Any.

    Returns:
        False where more than attention's plain sums are kept, entries are rounded or turned, or
        a layer is neither H2O's nor one with a sliding window.
    """
    layers = enumerate(cache.layers)
    return (
        all(
            isinstance(layer, SlotLayer)
            and layer.is_plain
            and not layer.marks_pattern
            # Which takes any block in pieces by itself.
            or is_window_layer(layer, index, cache.config)
            for index, layer in layers
        )
        and cache.kv_bits is None
        and not cache.rule.rolls
    )


def expect_piece(cache: H2OCache, goes_on: bool) -> None:
    """Says what the next forward brings.

    Every query of a piece attends to what was kept before the block and to the block up to
    itself, and nothing is evicted, so that outputs, scores and what is kept in the end are those
    of the block in one forward. Meanwhile the block is held whole.

    Args:
        cache: For which `can_take_pieces` holds; mutated.
        goes_on: True if more of the block follows after it; False for its last piece.
    """
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            layer.goes_on = goes_on
