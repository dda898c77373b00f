"""Two caches made one, so that sequences read apart are decoded together."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from h2okv.cache import H2OCache
from h2okv.cache.rows import empty_value
from h2okv.cache.slots import SlotLayer
from h2okv.engine.cache_store import CacheStore


def can_join(cache: H2OCache) -> bool:
    """Tells whether a cache's rows can be put beside another's.

    Args:
        cache: Any.

    Returns:
        True if all layers hold slots. Layers that keep transformers' own cache count columns, which
        differ between prompts of different length.
    """
    return all(isinstance(layer, SlotLayer) for layer in cache.layers)


def join(first: H2OCache, second: H2OCache, store: CacheStore | None = None) -> H2OCache:
    """Puts one cache's rows below another's, layer by layer.

    Args:
        first: Of one model and the same settings; emptied.
        second: Likewise.
        store: Where both are between two layers.

    Returns:
        ``first`` with the rows of both. A row behaves as before: it keeps its own budget.
    """
    layers: Any = zip(first.layers, second.layers, strict=True)
    for index, (upper, lower) in enumerate(layers):
        if store is not None:
            store.bring(first, index)
            _own(upper)
            store.bring(second, index)
        _join_layer(upper, lower)
        lower.reset()
        if store is not None:
            store.put_back(first, index, is_new=True)
    return first


def _own(layer: Any) -> None:
    """Copies what lies in a workspace that the next layer needs."""
    for name in layer.row_tensors():
        tensor = getattr(layer, name, None)
        if tensor is not None and tensor.dim() == 4:
            setattr(layer, name, tensor.clone())


def _join_layer(upper: Any, lower: Any) -> None:
    # Both are a SlotLayer that holds something, so that no tensor of it is None.
    widths = [layer.positions.shape[2] for layer in (upper, lower)]
    budgets = [list(astuple(own)) for own in upper.row_budgets + lower.row_budgets]
    grown = max(int(layer.cumulative_length) - layer.last_growth for layer in (upper, lower))
    # Rows whose slots are not all theirs to fill say which are; where nothing is evicted, all are.
    own_slots = upper.enabled is not None or lower.enabled is not None or widths[0] != widths[1]
    if own_slots and upper.policy.is_bounded:
        for layer in (upper, lower):
            layer.enabled = _enabled(layer)
    joined: dict[str, torch.Tensor] = {}
    for name in upper.row_tensors():
        parts: list[Any] = [getattr(layer, name, None) for layer in (upper, lower)]
        if parts[0] is None:
            continue
        if parts[0].dim() > 2 and parts[0].shape[2] == widths[0]:
            joined[name] = _stack(parts, max(widths), empty_value(name, max(widths)))
        else:
            joined[name] = torch.cat(parts)
        # One tensor of both caches is there twice, not the whole layer.
        setattr(upper, name, None)
        setattr(lower, name, None)
    joined["cumulative_length"] = torch.maximum(upper.cumulative_length, lower.cumulative_length)
    upper.turns = None  # of as many ranks as there were slots
    upper.restore(joined, {"row_budgets": budgets, "weights": None})
    upper.last_growth = int(upper.cumulative_length) - grown


def _enabled(layer: Any) -> torch.Tensor:
    if layer.enabled is not None:
        own: torch.Tensor = layer.enabled
        return own
    return torch.ones_like(layer.positions, dtype=torch.bool)


def _stack(parts: list[torch.Tensor], slots: int, filling: Any) -> torch.Tensor:
    """Rows of ``[B, H, S, ...]`` in ``slots`` slots each."""
    rows = sum(len(part) for part in parts)
    shape = (rows, parts[0].shape[1], slots, *parts[0].shape[3:])
    made = parts[0].new_full(shape, filling)
    start = 0
    for part in parts:
        made[start : start + len(part), :, : part.shape[2]] = part
        start += len(part)
    return made
