"""The model to measure, a checkpoint or random weights of a shape, and its bytes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from h2okv.cache import H2OCache
from h2okv.cache.support import auto_model
from h2okv.config import Positions
from h2okv.engine.memory import MemoryModel
from h2okv.models.loading import describe, load_weights

# Names of sizes in --shape, and in a model's config.
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
    """A model that another process can build with the same weights: by name, or by shape."""

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
        """Make the model in evaluation mode, directly with its dtype and on its device."""
        if self.shape is None:
            return load_weights(describe(self.name), dtype, device)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
        return model.eval()


def parse_shape(text: str) -> ModelSource:
    """Read a shape: a name, sizes such as ``hidden=768``, or both."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    base = items.pop(0).lower() if items and "=" not in items[0] else ""
    if base and base not in SHAPES:
        raise ValueError(
            f"--shape must be one of {', '.join(SHAPES)} or sizes, got {text!r}; give for example"
            " hidden=768,layers=12,heads=12,intermediate=3072,vocab=32000"
        )
    overrides: dict[str, int] = {}
    for item in items:
        name, _, value = (side.strip() for side in item.partition("="))
        if name not in _SIZES:
            raise ValueError(f"{name!r} in --shape is not a size; choose from {', '.join(_SIZES)}")
        try:
            overrides[name] = int(value)
        except ValueError:
            raise ValueError(f"{name}={value!r} in --shape is not a whole number") from None
    shape = SHAPES.get(base, {}) | overrides
    missing = [name for name in _REQUIRED if name not in shape]
    if missing:
        raise ValueError(f"--shape {text!r} lacks {', '.join(missing)}; add {missing[0]}=..")
    if not base:
        overrides.setdefault("kv_heads", overrides["heads"])
        overrides.setdefault("head_dim", overrides["hidden"] // max(1, overrides["heads"]))
    sizes = {"window": 131_072, "tied": 0} | shape | overrides
    for name, size in sizes.items():
        if name != "tied" and size < 1:
            raise ValueError(f"{name}={size} in --shape is below 1; give more")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(
            f"heads={sizes['heads']} in --shape must be a multiple of kv_heads={sizes['kv_heads']};"
            " change one of them"
        )
    if sizes["head_dim"] % 2:
        raise ValueError(f"head_dim={sizes['head_dim']} in --shape is odd; RoPE rotates pairs")
    if sizes["tied"] not in (0, 1):
        raise ValueError(f"tied={sizes['tied']} in --shape is neither 0 nor 1")
    labels = (f"{name}={value}" for name, value in overrides.items())
    return ModelSource(",".join(filter(None, (base, *labels))), sizes)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's weights and caches, without allocating them."""

    config: PreTrainedConfig
    dtype: torch.dtype
    positions: Positions = "original"

    def memory(self, kv_bits: int | None = None) -> MemoryModel:
        """Return the engine's memory model for an H2O cache of this model."""
        cache = H2OCache(self.config, positions=self.positions, kv_bits=kv_bits)
        return MemoryModel(self.config, cache, self.dtype)

    @cached_property
    def _model(self) -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = auto_model(self.config).from_config(
                self.config, dtype=self.dtype
            )
            return model

    @cached_property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @cached_property
    def step_weight_bytes(self) -> int:
        """``W``, the weights that a step reads: all but embedding tables, tied ones once."""
        tied = getattr(self._model.get_output_embeddings(), "weight", None)
        modules = self._model.modules()
        tables = {module.weight for module in modules if isinstance(module, torch.nn.Embedding)}
        return self.weight_bytes - sum(table.nbytes for table in tables - {tied})

    def full_bytes(self, batch: int, length: int) -> int:
        """Return the bytes of a full cache."""
        memory = self.memory()
        slots = memory.num_slot_layers * length * memory.num_kv_heads * memory.slots.entry
        return batch * (slots + self._window_bytes(memory, length))

    def h2o_bytes(self, batch: int, entries: int, length: int, kv_bits: int | None = None) -> int:
        """Return the bytes of an H2O cache with its scores and positions."""
        memory = self.memory(kv_bits)
        slot_bytes = memory.slots.total(entries) - memory.slots.total(0)
        return batch * int(memory.num_slot_layers * slot_bytes + self._window_bytes(memory, length))

    def prefill_bytes(self, batch: int, block: int) -> int:
        """Return a lower bound of a prompt block's memory besides weights and cache."""
        memory = self.memory()
        # Two products of a gated MLP exist at the same time, besides the hidden state.
        return batch * block * (memory.hidden + 2 * memory.width) * memory.element

    def _window_bytes(self, memory: MemoryModel, length: int) -> int:
        """Return the bytes of one sequence in layers without slots."""
        entries = sum(min(length, window) for window in memory.windows)
        return entries * memory.window_slots.num_heads * memory.window_slots.entry + memory.linear


def speedup_limit(weight_bytes: int, full_bytes: int, cache_bytes: int) -> float:
    """Return a step's speed-up over the full cache if reading bytes is all that counts."""
    return (weight_bytes + full_bytes) / (weight_bytes + cache_bytes)
