"""How much memory a model's parts and its sequences take, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from h2okv.cache import H2OCache

_NOTE_BYTES = 4 + 4 + 4
"""Of one slot: score, position and, when positions roll, rank."""
_GROWTH = 256
"""Slots that are added at once where nothing is evicted."""
_MARGIN = 1.25
"""What temporaries take beyond those that are counted (measured; see docs/throughput.md)."""
_FIXED_BYTES = 72 << 20
"""Scratch memory and kernels of the libraries, and stacks of threads: they come with the first
forward and stay."""


@dataclass(frozen=True)
class Demand:
    """The sizes that memory depends on.

    Attributes:
        hidden: Numbers of a token's state.
        width: Numbers of a token between the products of the MLP.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        key_size: Numbers of a key.
        vocabulary: Tokens.
        element: Bytes of a number.
        num_slot_layers: Layers that hold H2O's slots.
        windows: Of the other layers, the most tokens that each holds.
        entry_bytes: Of a slot's key and value, in one layer and for all KV heads.
        token_bytes: Of a token's key and value in the other layers, likewise.
    """

    hidden: int
    width: int
    num_heads: int
    num_kv_heads: int
    key_size: int
    vocabulary: int
    element: int
    num_slot_layers: int
    windows: tuple[int, ...]
    entry_bytes: float
    token_bytes: float

    def slots_of(self, cache: H2OCache, prompt: int, new: int) -> int:
        """Slots that a sequence needs in each layer.

        Args:
            cache: Says the budget; an empty one.
            prompt: Tokens of the prompt.
            new: Tokens that are generated at most.

        Returns:
            A number of slots.
        """
        if cache.policy.is_bounded:
            return cache.entries_for(prompt) + 1
        return prompt + -(-new // _GROWTH) * _GROWTH + _GROWTH

    def layer_bytes(self, slots: float) -> int:
        """Bytes of one sequence in one layer of slots."""
        return int(slots * (self.entry_bytes + self.num_kv_heads * _NOTE_BYTES))

    def sequence_bytes(self, slots: int, length: int, away: float = 0.0) -> int:
        """Bytes of one sequence in the memory of the device, in all layers.

        Args:
            slots: From `slots_of`.
            length: Tokens seen in the end, for layers that are not full attention.
            away: Share of the slot layers whose keys and values are in another tier.

        Returns:
            Bytes.
        """
        held = sum(min(length, window) for window in self.windows)
        own = self.num_slot_layers * self.layer_bytes(slots) + held * self.token_bytes
        return int(own - away * self.moved_bytes(slots))

    def moved_bytes(self, slots: float) -> float:
        """Keys and values of one sequence in all slot layers."""
        return self.num_slot_layers * slots * self.entry_bytes

    def decode_bytes(self, rows: int, slots: float) -> int:
        """Temporaries of a step: keys in fp32, probabilities, the MLP, the logits in fp32."""
        keys = self.num_kv_heads * self.key_size * slots * (4 if self.element < 4 else 0)
        weights = 3 * self.num_heads * slots * 4
        states = self.element * (8 * self.hidden + 4 * self.width)
        logits = self.vocabulary * (self.element + 2 * 4)
        return int(_MARGIN * rows * (keys + weights + states + logits))

    def prompt_bytes(self, tokens: int) -> int:
        """Temporaries of a prompt's block: states, heads, and the MLP.

        Args:
            tokens: Of all rows of one micro-batch, padding included.

        Returns:
            Bytes.
        """
        states = self.hidden * (4 * self.element + 2 * 4)
        heads = self.key_size * (4 * self.num_heads + 4 * self.num_kv_heads) * self.element
        heads += 60 * self.num_kv_heads
        return int(_MARGIN * tokens * (states + max(heads, 4 * self.width * self.element)))

    def waiting_bytes(self, tokens: int) -> int:
        """Bytes of prompts that wait before a layer while other micro-batches pass it."""
        return int(tokens * (self.hidden + 2 * self.key_size) * self.element * 1.1)

    @property
    def fixed_bytes(self) -> int:
        """What the first forward takes and keeps."""
        return _FIXED_BYTES


def demand_of(config: PreTrainedConfig, cache: H2OCache, dtype: torch.dtype) -> Demand:
    """Reads the sizes off a model's config.

    Args:
        config: The model's config.
        cache: An empty cache for it.
        dtype: Of weights and cache.

    Returns:
        The sizes.
    """
    text: Any = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Layers with H2O's slots can be asked what they hold.
    slot_layers = [layer for layer in cache.layers if hasattr(layer, "row_tensors")]
    others = [layer for layer in cache.layers if not hasattr(layer, "row_tensors")]
    # A recurrent layer's state is about as large as a window of its own width.
    windows = tuple(getattr(layer, "sliding_window", None) or size for layer in others)
    return Demand(
        hidden=text.hidden_size,
        width=_width(text),
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_size=size,
        vocabulary=text.vocab_size,
        element=dtype.itemsize,
        num_slot_layers=len(slot_layers),
        windows=windows,
        entry_bytes=2 * kv_heads * cache.head_bytes(size, dtype),
        token_bytes=2 * kv_heads * size * dtype.itemsize,
    )


def _width(text: Any) -> int:
    """The MLP's width, for a mixture of experts that of all experts that a token goes to."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp")
    widths = [getattr(text, name, None) or 0 for name in names]
    each = getattr(text, "moe_intermediate_size", None) or max(widths)
    widths.append((getattr(text, "num_experts_per_tok", None) or 0) * each)
    widths.append(getattr(text, "shared_expert_intermediate_size", None) or 0)
    return max(widths) or 4 * text.hidden_size
