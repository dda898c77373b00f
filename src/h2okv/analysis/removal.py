"""What it costs to hide tokens from attention, heavy hitters or others."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from h2okv.analysis.losses import token_losses
from h2okv.analysis.observing import LayerAttention, read_observed


def heaviest(scores: np.ndarray, count: int) -> np.ndarray:
    """Marks the tokens with the highest scores, for each layer and head.

    Args:
        scores: float ``[L, H, T]``.
        count: how many.

    Returns:
        bool ``[L, H, T]``.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def drawn(shape: tuple[int, ...], count: int, seed: int) -> np.ndarray:
    """Marks as many random tokens, for each layer and head on its own.

    Args:
        shape: ``(L, H, T)``.
        count: how many.
        seed: chooses the draw.

    Returns:
        bool ``[L, H, T]``.
    """
    return heaviest(np.random.default_rng(seed).random(shape), count)


def losses_with_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, hidden: np.ndarray, layers: tuple[int, ...]
) -> np.ndarray:
    """Computes the losses when some tokens are hidden from all queries but their own.

    A token still sees itself, so that no row of attention is empty.

    Args:
        model: a loaded model.
        input_ids: int64 ``[1, T]``.
        hidden: bool ``[L, H, T]``.
        layers: the layers of the array, in order.

    Returns:
        float64 ``[T]`` in nats; NaN for the first token.
    """
    masks = dict(zip(layers, torch.from_numpy(hidden), strict=True))

    def handler(layer: LayerAttention) -> torch.Tensor:
        mask = masks[layer.layer_idx].to(layer.key.device)
        value = layer.value.float().unsqueeze(1)
        parts = [
            probabilities @ value[:, :, : probabilities.shape[-1]]
            for _, probabilities in layer.rows(mask)
        ]
        return torch.cat(parts, dim=2).flatten(0, 1)

    return token_losses(read_observed(model, input_ids, handler).logits, input_ids)
