"""Perplexity without heavy hitters, and the activation of neurons."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from h2okv.integration.enable import input_device
from h2okv_lab.analysis.attention_stats import LayerAttention, read_observed
from h2okv_lab.tables import Row

_CHUNK = 256
_RESAMPLES = 2000
_BLOCK = 32  # tokens resampled together: the losses of neighbours depend on each other


def token_losses(logits: torch.Tensor, input_ids: torch.Tensor) -> np.ndarray:
    """Return losses of tokens ``[1, T]`` by logits ``[1, T, V]``: float64 ``[T]``, first NaN."""
    targets = input_ids[0, 1:].to(logits.device)
    chunks = zip(logits[0, :-1].split(_CHUNK), targets.split(_CHUNK), strict=True)
    losses = [F.cross_entropy(chunk.float(), true, reduction="none") for chunk, true in chunks]
    return np.concatenate([[np.nan], torch.cat(losses).cpu().numpy().astype(np.float64)])


@torch.inference_mode()
def dense_losses(model: PreTrainedModel, input_ids: torch.Tensor) -> np.ndarray:
    """Compute the losses with full attention; see `token_losses`."""
    logits = model(input_ids=input_ids.to(input_device(model)), use_cache=False).logits
    return token_losses(logits, input_ids)


def cost(losses: np.ndarray, baseline: np.ndarray, first: int = 1, seed: int = 0) -> Row:
    """Return the perplexity of losses ``[T]`` and its ratio to the baseline, with 95 % interval."""
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
    """Mark the ``count`` tokens with the highest of scores ``[L, H, T]``; bool ``[L, H, T]``."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def random_tokens(shape: tuple[int, ...], count: int, seed: int) -> np.ndarray:
    """Mark ``count`` random tokens in each layer and head; bool ``[L, H, T]``."""
    return heaviest(np.random.default_rng(seed).random(shape), count)


def losses_with_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, hidden: np.ndarray, layers: tuple[int, ...]
) -> np.ndarray:
    """Return losses ``[T]`` with tokens, bool ``[L, H, T]``, hidden from all later queries."""
    masks = dict(zip(layers, torch.from_numpy(hidden), strict=True))

    def handler(layer: LayerAttention) -> torch.Tensor:
        value = layer.value.float().unsqueeze(1)
        rows = layer.rows(masks[layer.layer_idx].to(value.device))
        outputs = [weights @ value[:, :, : weights.shape[-1]] for _, weights in rows]
        return torch.cat(outputs, dim=2).flatten(0, 1)

    return token_losses(read_observed(model, input_ids, handler).logits, input_ids)


_LAST_OF_MLP = ("down_proj", "fc2", "dense_4h_to_h", "c_proj")
# Threshold relative to a token's largest magnitude, for activations that are never exactly 0.
SHARE_OF_LARGEST = 0.1


def find_neurons(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Find each layer's linear map that reads the neurons."""
    modules = [
        module
        for name, module in model.named_modules()
        if name.endswith(".fc2")
        or (".mlp." in f".{name}" and name.rpartition(".")[2] in _LAST_OF_MLP)
    ]
    config = model.config.get_text_config(decoder=True)
    if len(modules) != config.num_hidden_layers:
        raise ValueError(
            f"the feed-forward layers of model type {config.model_type!r} are not recognised "
            f"({len(modules)} found for {config.num_hidden_layers} layers); leave out --neurons."
        )
    return modules


@torch.inference_mode()
def activation_frequency(model: PreTrainedModel, input_ids: torch.Tensor) -> np.ndarray:
    """Return the fraction of tokens at which each neuron is active: float64 ``[L, M]``."""
    config = model.config.get_text_config(decoder=True)
    name = getattr(config, "hidden_act", None) or getattr(config, "activation_function", "")
    counts: list[np.ndarray] = []  # the layers run in order

    def note(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        size = inputs[0].float().flatten(0, -2).abs()
        limit = 0.0 if name == "relu" else SHARE_OF_LARGEST * size.amax(dim=-1, keepdim=True)
        counts.append((size > limit).double().mean(dim=0).cpu().numpy())

    with ExitStack() as hooks:
        for module in find_neurons(model):
            hooks.callback(module.register_forward_pre_hook(note).remove)
        model(input_ids=input_ids.to(input_device(model)), use_cache=False, logits_to_keep=1)
    return np.stack(counts)
