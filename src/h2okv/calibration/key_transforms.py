"""Measure how keys are transformed before they are packed into 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.cache.layer import CacheLayer
from h2okv.cache.support import context_window, unwrap
from h2okv.calibration.layer_budgets import lock_of
from h2okv.config import Positions
from h2okv.console import write_remark
from h2okv.integration.enable import enable, input_device
from h2okv.ops.quant import KeyTransform
from h2okv.provenance import weights_state
from h2okv.records import first_line

# Random tokens show the same outlier channels as a text, and need no tokenizer.
_TOKENS = 512
# The first tokens of a text have keys of their own (attention sinks).
_SINKS = 4


def transforms_of_model(model: Any, rolls: bool = False) -> Mapping[int, KeyTransform]:
    """Measure each layer's `KeyTransform`, ``[1, H, 1, D]``, on the keys of 512 random tokens.

    The model reads them once, and again after its weights have changed. If it cannot, a line on
    stderr says so. With `rolls` keys are stored before they are rotated.
    """
    model = unwrap(model)
    with lock_of(model):
        state = weights_state(model)
        entry = _MEASURED.get(model)
        if entry is None or entry[0] != state:
            entry = _MEASURED[model] = state, {}
        transforms = entry[1]
        if rolls not in transforms:
            transforms[rolls] = _measure(model, rolls)
        return transforms[rolls]


_MEASURED: WeakKeyDictionary[Any, tuple[Any, dict[bool, Mapping[int, KeyTransform]]]]
_MEASURED = WeakKeyDictionary()


def _measure(model: PreTrainedModel, rolls: bool) -> dict[int, KeyTransform]:
    # Rolling positions have room for the window alone, however far RoPE scaling reaches.
    length = min(_TOKENS, context_window(model.config) or _TOKENS)
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
        write_remark(
            "note: keys are rounded to 4 bits without centering, which costs some models their text"
            f" ({first_line(error)}); 6 bits do not need it"
        )
        return {}
    layers = {n: layer for n, layer in enumerate(cache.layers) if isinstance(layer, CacheLayer)}
    return {number: _transform_of(layer) for number, layer in layers.items()}


def _transform_of(layer: CacheLayer) -> KeyTransform:
    """Return centers, and the square roots of the channels' standard deviations as scales."""
    keys, positions = layer.state.stored("keys")[0].float(), layer.state.positions[0]
    is_counted = (positions >= _SINKS).unsqueeze(-1)
    count = is_counted.sum(dim=1, keepdim=True).clamp(min=1)
    center = torch.where(is_counted, keys, 0.0).sum(dim=1, keepdim=True) / count
    squares = torch.where(is_counted, (keys - center).square(), 0.0)
    variance = squares.sum(dim=1, keepdim=True) / count
    mean = variance.mean(dim=-1, keepdim=True)
    # A channel that hardly moves must not be enlarged without limit.
    relative = torch.where(mean > 0, variance / mean, 1.0).clamp(min=1e-4)
    return KeyTransform(center[None], relative.pow(0.25)[None])
