"""States of linear-attention and convolution layers: one size, however long the text."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from h2okv.cache.slot_state import ordinary_tensors
from h2okv.cache.support import auto_model

# Their mixers begin a block of tokens with an empty state, whatever was read before.
_FORGETFUL = {"jamba"}
_FIELDS = ("conv_states", "recurrent_states")
# Older versions of transformers have no class for layers that hold nothing.
_FIXED = (LinearAttentionLayer, getattr(cache_utils, "DummyLayer", LinearAttentionLayer))


def has_fixed_state(layer: object) -> bool:
    """Tell whether a layer's state has a fixed size, or is empty."""
    return type(layer) in _FIXED


def has_states(cache: Cache) -> bool:
    """Tell whether a model has layers with a recurrent state, which cannot be rolled back."""
    return any(type(layer) is LinearAttentionLayer for layer in cache.layers)


def continues_blocks(model_type: str) -> bool:
    """Tell whether a block of several tokens continues from an earlier state."""
    return model_type not in _FORGETFUL


def continues_prompts(cache: Any) -> bool:
    """Tell whether a text may be read in several forwards at all."""
    kind = cache.config.get_text_config(decoder=True).model_type
    return not has_states(cache) or continues_blocks(kind)


def state_tensors(layer: object) -> dict[tuple[str, int], Tensor]:
    """Return the tensors of a layer's state, ``[B, ...]`` each, by field and number."""
    return {
        (name, number): tensor
        for name in _FIELDS
        for number, tensor in vars(layer).get(name, {}).items()
        if tensor is not None
    }


def held_bytes(layer: object) -> int:
    """Return the bytes of one of transformers' layers: keys, values, states."""
    tensors = (vars(layer).get("keys"), vars(layer).get("values"), *state_tensors(layer).values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def join_states(layer: object, other: object) -> None:
    """Append another layer's sequences; mutates the layer."""
    others = state_tensors(other)
    for (name, number), tensor in state_tensors(layer).items():
        vars(layer)[name][number] = torch.cat([tensor, others[name, number]])


def state_bytes(cache: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the states of one sequence of a model, without its weights."""
    indices = {i for i, layer in enumerate(cache.layers) if type(layer) is LinearAttentionLayer}
    if not indices:
        return 0
    config = copy.deepcopy(cache.config)
    states = DynamicCache(config=config)
    with torch.device("meta"), torch.no_grad():
        model: Any = auto_model(config).from_config(config, dtype=dtype)
        hidden_size = config.get_text_config(decoder=True).hidden_size
        hidden = torch.zeros(1, 1, hidden_size, dtype=dtype)
        for module in model.modules():
            is_mixer = "cache" in inspect.signature(module.forward).parameters and not any(
                hasattr(inner, "layer_idx") for inner in module.modules() if inner is not module
            )
            if is_mixer and getattr(module, "layer_idx", None) in indices:
                module(hidden, cache=states)
    return sum(t.nbytes for layer in states.layers for t in state_tensors(layer).values())


class LinearStates:
    """One layer's states of the sequences of a pool; the layer sees those in use."""

    def __init__(self, layer: object, max_num_seqs: int) -> None:
        self._layer = layer
        with ordinary_tensors():
            self._tensors = {
                key: tensor.new_zeros(max_num_seqs, *tensor.shape[1:])
                for key, tensor in state_tensors(layer).items()
            }

    @property
    def tensors(self) -> list[Tensor]:
        """The states of all sequences, ``[max_num_seqs, ...]`` each."""
        return list(self._tensors.values())

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by a changed one; mutates the states."""
        self._tensors = {key: change(tensor) for key, tensor in self._tensors.items()}

    def admit(self, row: int, source: object, sequence: int) -> None:
        """Copy the state of a sequence of another layer to a row."""
        for key, tensor in state_tensors(source).items():
            self._tensors[key][row] = tensor[sequence]

    def copy_to(self, layer: Any, row: int) -> None:
        """Copy a row's state into an empty layer; mutates the layer."""
        for (name, number), tensor in self._tensors.items():
            state = tensor[row : row + 1]
            layer.lazy_initialization(**{name: state}, state_idx=number)
            vars(layer)[name][number].copy_(state)
            layer.has_previous_state[number] = True

    def show(self, used: int) -> None:
        """Point the layer at the first rows; mutates the layer."""
        for (name, number), tensor in self._tensors.items():
            getattr(self._layer, name)[number] = tensor[:used]
