"""Bytes of weights and caches, by arithmetic: the limit of a speed-up, and what fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from h2okv.benchmarking.caches import CacheSpec
from h2okv.ops.quant import packed_bytes

_SCORE_BYTES = _POSITION_BYTES = _RANK_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """How many bytes a model's parts take, and what a decode step must read of them.

    Attributes:
        weight_bytes: All weights.
        step_weight_bytes: ``W``, the weights that a decode step reads: all but the rows of
            embedding tables; a head that is tied to the table counts once. All experts of a
            mixture count.
        entry_bytes: ``e`` of a full cache: key and value of one token in all full-attention layers
            and KV heads.
        head_size: Numbers of one head's key, or value.
        metadata_bytes: What H2O holds beside an entry: score (fp32), position (int32) and, where
            positions roll, rank (int32), in the same layers and heads.
        windowed: For layers that are not full attention, pairs of bytes of one token and of the
            most tokens held.
        num_heads: Query heads.
        width: Numbers that a token needs at once between two products of the MLP.
        element_bytes: Of one number in the model's dtype.
    """

    weight_bytes: int
    step_weight_bytes: int
    entry_bytes: int
    head_size: int
    metadata_bytes: int
    windowed: tuple[tuple[int, int], ...]
    num_heads: int
    width: int
    element_bytes: int

    def full_bytes(self, batch: int, length: int) -> int:
        """Bytes of a cache that holds everything."""
        return batch * (length * self.entry_bytes + self._windowed_bytes(length))

    def h2o_bytes(self, batch: int, entries: int, length: int, kv_bits: int | None = None) -> int:
        """Bytes of an H2O cache, its scores and positions included."""
        entry = self.entry_bytes
        if kv_bits is not None:
            heads = entry // (self.head_size * self.element_bytes)
            entry = heads * packed_bytes(self.head_size, kv_bits)
        own = entries * (entry + self.metadata_bytes)
        return batch * (own + self._windowed_bytes(length))

    def cache_bytes(self, spec: CacheSpec, batch: int, context: int) -> int:
        """Bytes that a cache holds after a prompt; for packed baselines an upper bound."""
        entries = spec.entries(context)
        if spec.name == "h2o":
            # One slot is always free for the next token.
            return self.h2o_bytes(batch, entries + 1, context, spec.kv_bits)
        return self.full_bytes(batch, entries + 1 if spec.name == "static" else entries)

    def prefill_bytes(self, batch: int, block: int) -> int:
        """A lower bound of what reading a block of a prompt needs beside weights and cache."""
        return batch * block * self.width * self.element_bytes

    def _windowed_bytes(self, length: int) -> int:
        return sum(size * min(length, window) for size, window in self.windowed)


def footprint_of(config: PreTrainedConfig, dtype: torch.dtype, rolls: bool = False) -> Footprint:
    """Counts a model's bytes without making its weights."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    entry = 2 * kv_heads * head_dim * dtype.itemsize
    metadata = kv_heads * (_SCORE_BYTES + _POSITION_BYTES + (_RANK_BYTES if rolls else 0))
    layers = DynamicCache(config=config).layers
    num_full = sum(type(layer) is DynamicLayer for layer in layers)
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    weights, step_weights = _weights(config, dtype)
    # Two of the products of a gated MLP are there at once, beside the state itself.
    width = text.hidden_size + 2 * (getattr(text, "intermediate_size", None) or text.hidden_size)
    return Footprint(
        weight_bytes=weights,
        step_weight_bytes=step_weights,
        entry_bytes=num_full * entry,
        head_size=head_dim,
        metadata_bytes=num_full * metadata,
        windowed=tuple((entry, window) for window in windows if window),
        num_heads=heads,
        width=width,
        element_bytes=dtype.itemsize,
    )


def _weights(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of all weights, and of those that a step reads."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    total = sum(parameter.nbytes for parameter in model.parameters())
    head = model.get_output_embeddings()
    tables = {
        id(module.weight): module.weight.nbytes
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
    }
    if head is not None:
        tables.pop(id(head.weight), None)
    return total, total - sum(tables.values())


def speedup_limit(weight_bytes: int, full_bytes: int, own_bytes: int) -> float:
    """How many times as fast as the full cache a step can be if reading bytes is all that counts.

    A decode step reads the weights once for the whole batch and every sequence's cache once:
    ``(W + B n e) / (W + B K e')``, where ``e'`` of H2O includes an entry's score and position.
    """
    if min(weight_bytes, full_bytes, own_bytes) < 0 or weight_bytes + own_bytes == 0:
        raise ValueError(
            f"a step over {weight_bytes} bytes of weights and {own_bytes} of cache reads nothing;"
            " give the bytes of a model"
        )
    return (weight_bytes + full_bytes) / (weight_bytes + own_bytes)
