"""Layers with a sliding window, in slots: the window's tokens are what a recent budget keeps."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2okv.cache.positions import PositionRule
from h2okv.cache.slots import SlotLayer
from h2okv.config import Budget
from h2okv.policy import get_policy


def is_window_layer(layer: Any, layer_idx: int, config: PreTrainedConfig) -> bool:
    """Tells whether a layer's tokens see the newest ones and nothing else.

    Args:
        layer: Of a cache.
        layer_idx: Its index.
        config: The model's.

    Returns:
        False for chunks, which transformers keeps in the same kind of layer.
    """
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None)
    return (
        type(layer) is DynamicSlidingWindowLayer
        and layer.sliding_window > 1
        and kinds is not None
        and kinds[layer_idx] == "sliding_attention"
    )


def window_slots(
    layer: DynamicSlidingWindowLayer, layer_idx: int, sequence: int, seen: int
) -> SlotLayer:
    """Makes slots of what a sliding layer holds of one sequence.

    A token sees itself and the ``W - 1`` before it, which is a step over ``W`` slots.

    Args:
        layer: Has read prompts, padded on the left; unchanged.
        layer_idx: Its index.
        sequence: Which of them.
        seen: Its tokens, without padding.

    Returns:
        A layer that goes on in the same way, one token at a time.
    """
    window = layer.sliding_window
    budget = Budget(heavy=0, recent=window - 1)
    rule = PositionRule("original", None, None)
    made = SlotLayer(layer_idx, budget, get_policy("recent"), rule)
    made.window = window
    held = min(seen, layer.keys.shape[2])
    with torch.inference_mode(False), torch.no_grad():
        keys, values = (
            torch.nn.functional.pad(
                part[sequence : sequence + 1, :, part.shape[2] - held :], (0, 0, 0, window - held)
            )
            for part in (layer.keys, layer.values)
        )
        made.lazy_initialization(keys, values)
        made._resolve_budget([seen])
        slots = torch.arange(window, device=keys.device)
        positions = torch.where(slots < held, seen - held + slots, -1).to(torch.int32)
        shape = (1, keys.shape[1], window)
        made.keys, made.values = keys.contiguous(), values.contiguous()
        made.positions = positions.expand(shape).contiguous()
        made.scores = torch.zeros(shape, dtype=torch.float32, device=keys.device)
        made.free = torch.full((*shape[:2], 1), min(held, window - 1), device=keys.device)
        made.num_real_tokens += seen
        made.cumulative_length += seen
    return made
