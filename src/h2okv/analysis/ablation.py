"""What removing heavy hitters does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from h2okv.analysis.attention_stats import LayerAttention, read_observed
from h2okv.records import Row

_CHUNK = 256
_RESAMPLES = 2000
_BLOCK = 32
"""Tokens resampled together: the losses of neighbours depend on each other."""


def token_losses(logits: torch.Tensor, input_ids: torch.Tensor) -> np.ndarray:
    """The loss of every token in nats, float64 ``[T]``; NaN for the first, which nothing predicts.

    ``logits`` is ``[1, T, V]``, ``input_ids`` int64 ``[1, T]``.
    """
    targets = input_ids[0, 1:].to(logits.device)
    parts = [
        F.cross_entropy(some_logits.float(), some_targets, reduction="none")
        for some_logits, some_targets in zip(
            logits[0, :-1].split(_CHUNK), targets.split(_CHUNK), strict=True
        )
    ]
    return np.concatenate([[np.nan], torch.cat(parts).cpu().numpy().astype(np.float64)])


@torch.inference_mode()
def dense_losses(model: PreTrainedModel, input_ids: torch.Tensor) -> np.ndarray:
    """Computes the losses with full attention; see `token_losses`."""
    logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits
    return token_losses(logits, input_ids)


def cost(losses: np.ndarray, baseline: np.ndarray, first: int = 1, seed: int = 0) -> Row:
    """Perplexity of losses ``[T]``, its ratio to the baseline's, and the ratio's 95 % interval.

    The interval, a bootstrap over blocks of 32 tokens, says how sure the ratio is for texts like
    this one read by this model, not for others.
    """
    gaps = (losses - baseline)[first:]
    blocks = [gaps[i : i + _BLOCK] for i in range(0, len(gaps), _BLOCK)]
    sums = np.array([block.sum() for block in blocks])
    counts = np.array([len(block) for block in blocks])
    draws = np.random.default_rng(seed).integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    perplexity, ratio = np.exp([losses[first:].mean(), gaps.mean()])
    return {"perplexity": perplexity, "ratio": ratio, "low": low, "high": high}


def heaviest(scores: np.ndarray, count: int) -> np.ndarray:
    """Marks the ``count`` tokens with the highest of scores ``[L, H, T]``; bool ``[L, H, T]``."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def drawn(shape: tuple[int, ...], count: int, seed: int) -> np.ndarray:
    """Marks as many random tokens, for each layer and head on its own; bool ``[L, H, T]``."""
    return heaviest(np.random.default_rng(seed).random(shape), count)


def losses_with_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, hidden: np.ndarray, layers: tuple[int, ...]
) -> np.ndarray:
    """The losses, float64 ``[T]``, when some tokens are hidden from all queries but their own.

    ``hidden`` is bool ``[L, H, T]`` for ``layers`` in order. A token still sees itself, so that no
    row of attention is empty.
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


_LAST_OF_MLP = ("down_proj", "fc2", "dense_4h_to_h", "c_proj")
SHARE_OF_LARGEST = 0.1


def find_neurons(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Finds the linear maps that read the neurons, one for each layer."""
    found = [
        module
        for name, module in model.named_modules()
        if (name.rsplit(".", 1)[-1] in _LAST_OF_MLP and ".mlp." in f".{name}")
        or name.endswith(".fc2")
    ]
    config = model.config.get_text_config(decoder=True)
    if len(found) != config.num_hidden_layers:
        raise ValueError(
            f"the feed-forward layers of model type {config.model_type!r} cannot be told apart "
            f"({len(found)} found for {config.num_hidden_layers} layers); leave out --neurons."
        )
    return found


@torch.inference_mode()
def activation_frequency(model: PreTrainedModel, input_ids: torch.Tensor) -> np.ndarray:
    """Counts at which fraction of the tokens each neuron is active: float64 ``[L, M]``.

    With ReLU a neuron is active if it is above 0. Other activations are never exactly 0; there it
    counts as active if its magnitude is at least 10 % of the largest one at that token.
    """
    found = find_neurons(model)
    config = model.config.get_text_config(decoder=True)
    name = getattr(config, "hidden_act", None) or getattr(config, "activation_function", "")
    is_relu = name == "relu"
    counts: dict[int, np.ndarray] = {}

    def note(index: int, inputs: tuple[Any, ...]) -> None:
        size = inputs[0].float().flatten(0, -2).abs()
        limit = 0.0 if is_relu else SHARE_OF_LARGEST * size.amax(dim=-1, keepdim=True)
        counts[index] = (size > limit).double().mean(dim=0).cpu().numpy()

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, index=index: note(index, inputs))
        for index, module in enumerate(found)
    ]
    try:
        model(input_ids=input_ids.to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack([counts[index] for index in range(len(found))])
