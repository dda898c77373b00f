"""Latent attention (MLA): one entry of a token for all heads, of which a layer keeps one set.

Models cache the latent and the rotated part of a token's key, and expand both into keys and values
of every head. A query meets them unexpanded when it is multiplied by what would expand the key,
and so are values expanded after they were summed: attention with one KV head, whose key is
``[rotated part; latent]`` and whose value the latent. Its scores are sums over all query heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from h2okv.cache.slot_state import SlotState

EXPANDS_LATENTS = "kv_b_proj"
"""What all models call the matrix that expands latents into keys and values."""


class Latents(NamedTuple):
    """What `update` gets of T new tokens, as attention with one KV head takes it."""

    layer: Any
    key: Tensor  # [B, 1, T, r + R]: the rotated part, the latent
    value: Tensor  # [B, 1, T, R]: the latent


def join(latent: Tensor, rotated: Tensor) -> Tensor:
    """Return keys ``[B, 1, T, r + R]`` of latents and rotated parts."""
    return torch.cat([rotated, latent], dim=-1)


class Expansion(NamedTuple):
    """How a module turns latents ``[..., R]`` into values."""

    matrix: Tensor  # [HQ, R, dv]
    offset: Tensor | None  # [HQ, 1, dv]

    def __call__(self, latents: Tensor) -> Tensor:
        """Return values ``[B, HQ, T, dv]`` of latents ``[B, HQ or 1, T, R]``."""
        values = latents @ self.matrix
        return values if self.offset is None else values + self.offset


def absorb(module: Any, query: Tensor) -> tuple[Tensor, Expansion]:
    """Turn queries that meet keys into queries that meet latents.

    Args:
        module: the attention module.
        query: ``[B, HQ, T, dn + r]``, rotated behind.

    Returns:
        The queries ``[B, HQ, T, r + R]``, rotated before; and what turns sums of latents into
        outputs.
    """
    linear, rank = getattr(module, EXPANDS_LATENTS), module.kv_lora_rank
    offset = None
    if _is_plain(linear):
        weight = linear.weight
    else:  # what its forward, with all hooks, makes of each unit vector and of zero
        units = torch.eye(rank + 1, rank, dtype=query.dtype, device=query.device)
        weight, offset = linear(units).split([rank, 1])
        weight = (weight - offset).t()
    sizes = module.qk_nope_head_dim, module.v_head_dim
    weight = weight.to(query.dtype).reshape(-1, sum(sizes), rank)
    to_key, to_value = weight.split(sizes, dim=1)
    plain, rotated = query.split([sizes[0], module.qk_rope_head_dim], dim=-1)
    if offset is not None:  # that of keys is the same for all, and changes no probability
        offset = offset.to(query.dtype).view(-1, 1, sum(sizes))[..., sizes[0] :]
    expansion = Expansion(to_value.transpose(1, 2), offset)
    return torch.cat([rotated, plain @ to_key], dim=-1), expansion


def _is_plain(linear: Any) -> bool:
    """Tell whether a module's forward is a product with its weight, which is in memory."""
    # Offloading and adapters may leave the class and replace the forward of the instance.
    is_hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    is_matrix = type(linear) is nn.Linear and linear.weight.is_floating_point()
    return is_matrix and linear.bias is None and not is_hooked


# Largest relative difference between a module's values and its linear part's, of 8 bits too.
_CLOSE = 0.05
_CHECKED = 16  # tokens of a block


def check_expansion(module: Any, latents: Tensor, values: Tensor, expansion: Expansion) -> None:
    """Refuse a module whose values ``[B, HQ, T, dv]`` are no sum of parts of latents.

    Waits for the device, so for blocks only; modules with a plain matrix need no check.
    """
    if expansion.offset is None or module.training or torch.compiler.is_compiling():
        return
    latents, values = latents[:, :, -_CHECKED:], values[:, :, -_CHECKED:]
    if not (expansion(latents) - values).norm() <= _CLOSE * values.norm():
        raise ValueError(
            f"{type(module).__name__}: {EXPANDS_LATENTS} with its hooks and adapters must be linear"
            " up to a constant, as the cache holds latents that are expanded after they are summed;"
            " remove the hook, or use transformers' own cache."
        )


class LatentState(SlotState):
    """Slots of latents: values are a part of the keys, and no tensors of their own."""

    has_values = False
    value_size: int

    @classmethod
    def of(cls, state: SlotState, value_size: int) -> LatentState:
        """Make one of a state without slots."""
        latents = cls.__new__(cls)
        vars(latents).update({name: v for name, v in vars(state).items() if name != "values"})
        latents.value_size = value_size
        return latents

    @property
    def values(self) -> Any:
        """``[B, 1, S, R]``, a view."""
        keys: Any = self.keys
        return keys[..., -self.value_size :]

    @values.setter
    def values(self, values: Any) -> None:
        """Leave out what the keys hold already."""
