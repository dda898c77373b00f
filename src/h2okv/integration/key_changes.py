"""Measure what keys of 4 bits are packed relative to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.cache.layer import CacheLayer
from h2okv.cache.support import unwrap
from h2okv.config import Positions
from h2okv.console import write_remark
from h2okv.integration.enable import enable, input_device
from h2okv.integration.layer_budgets import lock_of
from h2okv.integration.loading import context_of
from h2okv.ops.quant import KeyChange
from h2okv.provenance import weights_state
from h2okv.records import first_line

# Random tokens show the same channels as a text, and need no tokenizer.
_TOKENS = 512
# The first tokens of a text have keys of their own (attention sinks).
_SINKS = 4


def changes_of_model(model: Any, rolls: bool = False) -> Mapping[int, KeyChange]:
    """Return each layer's `KeyChange`, for one sequence, from the keys of 512 random tokens.

    Where positions roll, from keys that are not rotated yet.

    It reads them once for a model in memory, and again after its weights have changed. Where it
    cannot, keys are packed as they are, and a line on stderr says so.
    """
    model = unwrap(model)
    with lock_of(model):
        state = weights_state(model)
        entry = _MEASURED.get(model)
        if entry is None or entry[0] != state:
            entry = _MEASURED[model] = state, {}
        changes = entry[1]
        if rolls not in changes:
            changes[rolls] = _measure(model, rolls)
        return changes[rolls]


_MEASURED: WeakKeyDictionary[Any, tuple[Any, dict[bool, Mapping[int, KeyChange]]]]
_MEASURED = WeakKeyDictionary()


def _measure(model: PreTrainedModel, rolls: bool) -> dict[int, KeyChange]:
    length = min(_TOKENS, context_of(model.config) or _TOKENS)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(0, vocab_size, (1, length), generator=generator, device="cpu")
    positions: Positions = "rolling" if rolls else "original"
    cache = H2OCache(model.config, 0, length - 1, policy="recent", positions=positions)
    try:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError("some of its weights are not in memory")
        with torch.inference_mode(False), torch.no_grad(), enable(model):
            model(ids.to(input_device(model)), **{CACHE: cache})
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        write_remark(f"note: keys are rounded to 4 bits as they are ({first_line(error)})")
        return {}
    layers = {n: layer for n, layer in enumerate(cache.layers) if isinstance(layer, CacheLayer)}
    return {number: _change(layer) for number, layer in layers.items()}


def _change(layer: CacheLayer) -> KeyChange:
    """Return centers, and the roots of the channels' deviations as scales."""
    keys, positions = layer.state.stored("keys")[0].float(), layer.state.positions[0]
    counts = (positions >= _SINKS).unsqueeze(-1)
    number = counts.sum(dim=1, keepdim=True).clamp(min=1)
    center = torch.where(counts, keys, 0.0).sum(dim=1, keepdim=True) / number
    square = torch.where(counts, (keys - center).square(), 0.0).sum(dim=1, keepdim=True) / number
    mean = square.mean(dim=-1, keepdim=True)
    # A channel that hardly moves must not be enlarged without limit.
    relative = torch.where(mean > 0, square / mean, 1.0).clamp(min=1e-4)
    return KeyChange(center[None], relative.pow(0.25)[None])
