"""The model that is measured: a checkpoint, or random weights of a known shape."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

_REQUIRED = ("hidden", "layers", "heads", "intermediate", "vocab")
_SEED = 0


@dataclass(frozen=True)
class Shape:
    """What the time of a step depends on; the weights themselves are random.

    Attributes:
        name: What the user calls it.
        window: Positions that the model takes.
        tied: 1 if the head is the embedding table, else 0.
        family: ``"llama"``, or ``"qwen2"`` with biases on queries, keys and values.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    window: int = 131_072
    tied: int = 0
    family: str = "llama"

    def __post_init__(self) -> None:
        for name in (*_REQUIRED, "kv_heads", "head_dim", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} in --shape is below 1; give more")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} in --shape is no multiple of kv_heads={self.kv_heads};"
                " every KV head serves as many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} in --shape is odd; RoPE rotates pairs")
        if self.tied not in (0, 1):
            raise ValueError(f"tied={self.tied} in --shape is neither 0 nor 1")

    def config(self) -> PreTrainedConfig:
        """Makes the config of a model of this shape."""
        kind: Any = Qwen2Config if self.family == "qwen2" else LlamaConfig
        return kind(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=self.window,
            tie_word_embeddings=bool(self.tied),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


# The figures of the config.json beside each model card: meta-llama/Meta-Llama-3-8B,
# meta-llama/Llama-3.1-8B, meta-llama/Llama-3.2-1B, meta-llama/Llama-2-7b-hf, Qwen/Qwen2.5-7B.
# "small" has the sizes of GPT-2 (12 layers, hidden 768) in a Llama.
_SHAPES = (
    Shape("llama-3-8b", 4096, 32, 32, 8, 128, 14336, 128_256, window=8192),
    Shape("llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128_256),
    Shape("llama-3.2-1b", 2048, 16, 32, 8, 64, 8192, 128_256, tied=1),
    Shape("llama-2-7b", 4096, 32, 32, 32, 128, 11008, 32_000, window=4096),
    Shape("qwen2.5-7b", 3584, 28, 28, 4, 128, 18944, 152_064, family="qwen2"),
    Shape("small", 768, 12, 12, 12, 64, 3072, 32_000, window=32_768),
)
SHAPES = {shape.name: shape for shape in _SHAPES}
"""The shapes that have a name."""


def parse_shape(text: str, layers: int | None = None) -> Shape:
    """Reads a shape: a name, sizes such as ``hidden=768``, or both; ``layers`` cuts the depth."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    base = None
    if parts and "=" not in parts[0]:
        base = SHAPES.get(parts.pop(0).lower())
        if base is None:
            raise ValueError(
                f"--shape {text!r} is not known; choose from {', '.join(SHAPES)}, or give sizes"
                " such as hidden=768,layers=12,heads=12,intermediate=3072,vocab=32000"
            )
    sizes = dict(_size(part) for part in parts)
    if layers is not None:
        if layers < 1:
            raise ValueError(f"--layers {layers} is too few; give 1 or more")
        known = sizes.get("layers", base.layers if base else layers)
        if layers > known:
            raise ValueError(f"--layers {layers} is above the shape's {known}; it only cuts")
        sizes["layers"] = layers
    told = ",".join(f"{name}={value}" for name, value in sizes.items())
    if base is not None:
        name = f"{base.name},{told}" if told else base.name
        return replace(base, **{**sizes, "name": name})  # type: ignore[arg-type]
    missing = [name for name in _REQUIRED if name not in sizes]
    if missing:
        raise ValueError(f"--shape {text!r} lacks {', '.join(missing)}; add {missing[0]}=..")
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("head_dim", sizes["hidden"] // max(1, sizes["heads"]))
    name = ",".join(f"{key}={value}" for key, value in sizes.items())
    return Shape(name=name, **sizes)  # type: ignore[arg-type]


def _size(part: str) -> tuple[str, int]:
    name, _, value = (word.strip() for word in part.partition("="))
    known = [field.name for field in fields(Shape) if field.name not in ("name", "family")]
    if name not in known:
        raise ValueError(f"{name!r} in --shape is no size; choose from {', '.join(known)}")
    try:
        return name, int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} in --shape is no whole number") from None


@dataclass(frozen=True)
class ModelSource:
    """A model that another process can build with the same weights: a shape or a folder."""

    name: str
    shape: Shape | None = None
    folder: str | None = None

    def config(self) -> PreTrainedConfig:
        """Returns the model's config."""
        if self.shape is not None:
            return self.shape.config()
        assert self.folder is not None
        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the configuration of --model {self.name!r} cannot be loaded"
                f" ({type(error).__name__}); check the name and the network, or give a folder"
            ) from error

    def build(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Makes the model in evaluation mode, directly in its dtype and on its device."""
        if self.shape is not None:
            torch.manual_seed(_SEED)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
            return model.eval()
        assert self.folder is not None
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=dtype, trust_remote_code=False
            )
        except (OSError, RuntimeError, ValueError) as error:
            first_line = next(iter(str(error).splitlines()), "no reason given")
            raise ValueError(
                f"the weights of --model {self.name!r} cannot be loaded ({first_line}); get the"
                " model again or choose another"
            ) from error
        return loaded.to(device).eval()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelSource:
        """Makes the source that `dataclasses.asdict` described."""
        shape = values["shape"]
        return cls(values["name"], shape and Shape(**shape), values["folder"])
