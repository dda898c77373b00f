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


def absorb(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries that meet keys into queries that meet latents.

    Args:
        module: the attention module.
        query: ``[B, HQ, T, dn + r]``, rotated behind.

    Returns:
        The queries ``[B, HQ, T, r + R]``, rotated before; and the matrices ``[HQ, R, dv]`` that
        turn sums of latents into outputs.
    """
    linear: Any = getattr(module, EXPANDS_LATENTS)
    if type(linear) is nn.Linear and linear.weight.is_floating_point():
        weight = linear.weight
    else:  # in few bits, or with adapters: what it makes of each unit vector
        units = torch.eye(module.kv_lora_rank, dtype=query.dtype, device=query.device)
        weight = linear(units).t()
    sizes = module.qk_nope_head_dim, module.v_head_dim
    weight = weight.to(query.dtype).view(-1, sum(sizes), module.kv_lora_rank)
    to_key, to_value = weight.split(sizes, dim=1)
    plain, rotated = query.split([sizes[0], module.qk_rope_head_dim], dim=-1)
    return torch.cat([rotated, plain @ to_key], dim=-1), to_value.transpose(1, 2)


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
