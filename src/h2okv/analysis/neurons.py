"""How often each neuron of the feed-forward layers is active (arXiv 2306.14048, appendix)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

_LAST_OF_MLP = ("down_proj", "fc2", "dense_4h_to_h", "c_proj")
SHARE_OF_LARGEST = 0.1


def find_neurons(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Finds the linear maps that read the neurons, one for each layer.

    Args:
        model: a loaded model.

    Returns:
        The modules, layers in order.

    Raises:
        ValueError: if there is not exactly one for each layer (experts, unusual names).
    """
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
    """Counts at which share of the tokens each neuron is active.

    With ReLU a neuron is active if it is above 0. Other activations are never exactly 0; there it
    counts as active if its magnitude is at least 10 % of the largest one at that token.

    Args:
        model: a loaded model with a plain or gated MLP in every layer (no experts).
        input_ids: int64 ``[1, T]``.

    Returns:
        float64 ``[L, M]``.

    Raises:
        ValueError: if the MLPs cannot be found.
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
