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


class Latents(NamedTuple):
    """What `update` gets of T new tokens, as attention with one KV head takes it."""

    layer: Any
    key: Tensor  # [B, 1, T, r + R]: the rotated part, the latent
    value: Tensor  # [B, 1, T, R]: the latent


def join(latent: Tensor, rotated: Tensor) -> Tensor:
    """Return keys ``[B, 1, T, r + R]`` of latents and rotated parts."""
    return torch.cat([rotated, latent], dim=-1)


def absorb(module: Any, query: Tensor) -> Tensor:
    """Return queries ``[B, HQ, T, r + R]`` that meet latents, of those that meet keys.

    Args:
        module: the attention module.
        query: ``[B, HQ, T, dn + r]``, rotated behind.
    """
    plain, rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    to_key = _expansion(module, query)[:, : module.qk_nope_head_dim]
    return torch.cat([rotated, plain @ to_key], dim=-1)


def expand(module: Any, output: Tensor) -> Tensor:
    """Return outputs ``[B, HQ, T, dv]`` of sums of latents ``[B, HQ, T, R]``."""
    to_value = _expansion(module, output)[:, module.qk_nope_head_dim :]
    return output @ to_value.transpose(1, 2)


def _expansion(module: Any, states: Tensor) -> Tensor:
    """Return what expands a latent into keys and values, ``[HQ, dn + dv, R]``."""
    linear: Any = module.kv_b_proj
    if type(linear) is nn.Linear and linear.weight.is_floating_point():
        weight = linear.weight
    else:  # in few bits, or with adapters: what it makes of each unit vector
        units = torch.eye(module.kv_lora_rank, dtype=states.dtype, device=states.device)
        weight = linear(units).t()
    size = module.qk_nope_head_dim + module.v_head_dim
    return weight.to(states.dtype).view(-1, size, module.kv_lora_rank)


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
