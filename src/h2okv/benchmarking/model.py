"""The model that is measured, a checkpoint or random weights of a known shape, and its bytes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from h2okv.cache import H2OCache
from h2okv.config import Positions
from h2okv.engine.memory import MemoryModel
from h2okv.integration.loading import describe, load_weights

if TYPE_CHECKING:
    from h2okv.benchmarking.caches import CacheSpec

# The names of the sizes in --shape, and in a model's config.
_SIZES = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate": "intermediate_size",
    "vocab": "vocab_size", "window": "max_position_embeddings", "tied": "tie_word_embeddings",
}  # fmt: skip
_REQUIRED = ("hidden", "layers", "heads", "intermediate", "vocab")
SHAPES: dict[str, dict[str, int]] = tomllib.loads(
    Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class ModelSource:
    """A model that another process builds with the same weights: by its name, or of a shape."""

    name: str
    shape: Mapping[str, int] | None = None  # sizes by name; head and embeddings can be ``tied``

    def config(self) -> PreTrainedConfig:
        if self.shape is None:
            return describe(self.name).config
        # Qwen2 has biases on queries, keys and values.
        kind: Any = Qwen2Config if self.name.startswith("qwen2") else LlamaConfig
        sizes: dict[str, Any] = {_SIZES[name]: size for name, size in self.shape.items()}
        sizes["tie_word_embeddings"] = bool(self.shape["tied"])
        return kind(**sizes, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))

    def build(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Make the model in evaluation mode, directly in its dtype and on its device."""
        if self.shape is None:
            return load_weights(describe(self.name), dtype, device)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
        return model.eval()


def parse_shape(text: str, layers: int | None = None) -> ModelSource:
    """Read a shape: a name, sizes such as ``hidden=768``, or both; ``layers`` cuts the depth."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    base = parts.pop(0).lower() if parts and "=" not in parts[0] else ""
    if base and base not in SHAPES:
        raise ValueError(
            f"--shape {text!r} is not known; choose from {', '.join(SHAPES)}, or give sizes such"
            " as hidden=768,layers=12,heads=12,intermediate=3072,vocab=32000"
        )
    given: dict[str, int] = {}
    for part in parts:
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _SIZES:
            raise ValueError(f"{name!r} in --shape is not a size; choose from {', '.join(_SIZES)}")
        try:
            given[name] = int(value)
        except ValueError:
            raise ValueError(f"{name}={value!r} in --shape is not a whole number") from None
    known = SHAPES.get(base, {}) | given
    if layers is not None:
        depth = known.get("layers", layers)
        if not 1 <= layers <= depth:
            raise ValueError(
                f"--layers {layers} is out of range; it cuts the shape's {depth}, so give 1 to that"
            )
        known["layers"] = given["layers"] = layers
    missing = [name for name in _REQUIRED if name not in known]
    if missing:
        raise ValueError(f"--shape {text!r} lacks {', '.join(missing)}; add {missing[0]}=..")
    if not base:
        given.setdefault("kv_heads", given["heads"])
        given.setdefault("head_dim", given["hidden"] // max(1, given["heads"]))
    sizes = {"window": 131_072, "tied": 0} | known | given
    for name, size in sizes.items():
        if name != "tied" and size < 1:
            raise ValueError(f"{name}={size} in --shape is below 1; give more")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(
            f"heads={sizes['heads']} in --shape is not a multiple of kv_heads={sizes['kv_heads']};"
            " every KV head serves as many query heads"
        )
    if sizes["head_dim"] % 2:
        raise ValueError(f"head_dim={sizes['head_dim']} in --shape is odd; RoPE rotates pairs")
    if sizes["tied"] not in (0, 1):
        raise ValueError(f"tied={sizes['tied']} in --shape is neither 0 nor 1")
    told = (f"{name}={value}" for name, value in given.items())
    return ModelSource(",".join(filter(None, (base, *told))), sizes)


@dataclass(frozen=True)
class Footprint:
    """How many bytes a model's weights and caches take, without making them."""

    config: PreTrainedConfig
    dtype: torch.dtype
    positions: Positions = "original"

    def memory(self, kv_bits: int | None = None) -> MemoryModel:
        """The engine's arithmetic for an H2O cache of this model."""
        cache = H2OCache(self.config, positions=self.positions, kv_bits=kv_bits)
        return MemoryModel(self.config, cache, self.dtype)

    @cached_property
    def _model(self) -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)

    @cached_property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @cached_property
    def step_weight_bytes(self) -> int:
        """``W``, the weights that a step reads: all, tied ones once, but embedding tables."""
        tied = getattr(self._model.get_output_embeddings(), "weight", None)
        modules = self._model.modules()
        tables = {own.weight for own in modules if isinstance(own, torch.nn.Embedding)}
        return self.weight_bytes - sum(table.nbytes for table in tables - {tied})

    def full_bytes(self, batch: int, length: int) -> int:
        """Bytes of a cache that holds everything."""
        memory = self.memory()
        return batch * int(memory.kv_bytes(length) + self._window_bytes(memory, length))

    def h2o_bytes(self, batch: int, entries: int, length: int, kv_bits: int | None = None) -> int:
        """Bytes of an H2O cache, its scores and positions included."""
        memory = self.memory(kv_bits)
        own = memory.slots.total(entries) - memory.slots.total(0)
        return batch * int(memory.num_slot_layers * own + self._window_bytes(memory, length))

    def cache_bytes(self, spec: CacheSpec, batch: int, context: int, free: int = 1) -> int:
        """Bytes of a cache after a prompt, a free slot too; for packed baselines an upper bound."""
        entries = spec.entries(context)
        if spec.name == "h2o":
            return self.h2o_bytes(batch, entries + free, context, spec.kv_bits)
        return self.full_bytes(batch, entries + free if spec.name == "static" else entries)

    def prefill_bytes(self, batch: int, block: int) -> int:
        """A lower bound of what reading a block of a prompt needs beside weights and cache."""
        memory = self.memory()
        # Two of the products of a gated MLP are there at once, beside the state itself.
        return batch * block * (memory.hidden + 2 * memory.width) * memory.element

    def _window_bytes(self, memory: MemoryModel, length: int) -> int:
        """What the layers without slots hold of one sequence."""
        held = sum(min(length, window) for window in memory.windows)
        return held * memory.window_slots.num_heads * memory.window_slots.entry


def speedup_limit(weight_bytes: int, full_bytes: int, own_bytes: int) -> float:
    """How many times as fast as the full cache a step is if reading bytes is all that counts."""
    return (weight_bytes + full_bytes) / (weight_bytes + own_bytes)
