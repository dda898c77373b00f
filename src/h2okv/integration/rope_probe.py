"""Finds out how a model rotates its keys by asking its attention module."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from h2okv.cache.rope import Rotation, like_new
from h2okv.ops.rope import Layout, interleave_pairs, rotate

_POSITIONS = (5, 11)
_LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
_CLOSE = 0.03
"""Largest relative difference that rounding to bf16 leaves; a wrong layout gives about 1."""


class _KeysTakenError(Exception):
    """Leaves the attention module as soon as it has made its keys."""


class _KeyTaker(DynamicCache):
    """Takes the keys that an attention module hands to its cache."""

    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keeps the keys and goes no further."""
        self.taken = key_states.float()
        raise _KeysTakenError


def find_rotation(
    module: torch.nn.Module, layer_idx: int, key: Tensor, known: list[Rotation]
) -> Rotation | None:
    """Learns how an attention module rotates its keys, and checks it on two tokens.

    The module is run on random numbers at two positions and without a rotation; the one must be the
    other, rotated. So a family that rotates its keys in a way of its own is noticed.
    """
    rotary = _running_rotary(module)
    config: Any = module.config
    parameter = next(module.parameters())
    # Not the parameters' device, which have none while their weights are offloaded.
    dtype, device = key.dtype, key.device
    options: dict[str, Any] = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        options["layer_type"] = config.layer_types[layer_idx]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, config.hidden_size, generator=generator)
    hidden = hidden.to(device, parameter.dtype if parameter.is_floating_point() else dtype)
    # Not the running one: its frequencies may depend on what it has met.
    fresh = like_new(rotary, device)

    def keys_at(positions: tuple[int, int]) -> tuple[Tensor, Any]:
        ids = torch.tensor([positions], device=device)
        embeddings = fresh(hidden.to(dtype), ids, **options)
        return _keys(module, hidden, embeddings), embeddings

    plain, _ = keys_at((0, 0))
    rotated, embeddings = keys_at(_POSITIONS)
    if (rotated - plain).norm() <= 1e-6 * rotated.norm():
        return None
    # Some families hold complex numbers, which are never rounded to the model's dtype.
    held = torch.float32 if torch.is_tensor(embeddings) else dtype
    ids = torch.tensor([_POSITIONS], device=device)
    for layout in _LAYOUTS:
        layer_type = options.get("layer_type")
        trial = Rotation(fresh, layer_type, layout, held, device)
        back = rotate(interleave_pairs(rotated, trial.width, layout), trial.of_text(ids))
        start = rotate(
            interleave_pairs(plain, trial.width, layout), trial.of_text(torch.zeros_like(ids))
        )
        if (back - start).norm() <= _CLOSE * start.norm():
            rotation = Rotation(rotary, layer_type, layout, held, device)
            for other in known:
                if other.key == rotation.key:
                    return other
            known.append(rotation)
            return rotation
    raise _unknown(module)


def _keys(module: torch.nn.Module, hidden: Tensor, embeddings: Any) -> Tensor:
    """The keys ``[1, H, 2, D]`` that the module makes of hidden states and rotary embeddings."""
    taker = _KeyTaker()
    names = inspect.signature(module.forward).parameters
    cache_name = "layer_past" if "layer_past" in names else "past_key_values"
    arguments = {
        "hidden_states": hidden,
        "position_embeddings": embeddings,
        "attention_mask": None,
        cache_name: taker,
    }
    try:
        with torch.no_grad():
            module(**arguments)
    except _KeysTakenError:
        return taker.taken
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise _unknown(module) from error
    raise _unknown(module)


def _running_rotary(module: torch.nn.Module) -> Any:
    """The rotary embeddings of the model whose forward is running.

    An attention module does not know the model around it. Its forward, which has called the
    rotary embeddings, is further up the stack; this is looked at once for each layer.
    """
    family = type(module).__module__
    # Not this very frame: its locals would hold the frame itself, a cycle with all that the callers
    # hold, hidden states and logits among it.
    frame: FrameType | None = sys._getframe(1)
    try:
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.nn.Module):
                for child in caller.children():
                    name = type(child).__name__
                    if name.endswith("RotaryEmbedding") and type(child).__module__ == family:
                        return child
            frame = frame.f_back
    finally:
        del frame
    raise _unknown(module)


def _unknown(module: torch.nn.Module) -> ValueError:
    return ValueError(
        f"positions='rolling': cannot find out how {type(module).__name__} rotates its keys; "
        "use positions='original' for this model."
    )
