"""Attention layers on H2O states, and the models that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from h2okv.cache.rope import Rotation
from h2okv.config import CacheConfig
from h2okv.policy import Sees
from h2okv.vllm_plugin.settings import UNQUANTISED, parse, summary
from h2okv.vllm_plugin.state import StateLayer, block_bytes, model_rotation, state_spec

PREFIX = "H2O"
"""Prefix of an architecture's name for its version with H2O."""
logger = init_logger("vllm.h2okv")  # a child of vLLM's logger, with its level and format


class H2OAttention(nn.Module, MambaBase):
    """Replaces an attention layer; its state is in one block per request, like Mamba's."""

    def __init__(self, attention: Attention, cache: CacheConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_name = attention.layer_name
        self.num_heads, self.head_size = attention.num_heads, attention.head_size
        self.num_kv_heads = attention.num_kv_heads
        self.spec = state_spec(cache, self.num_kv_heads, self.head_size, dtype)
        impl = attention.impl
        softcap = getattr(impl, "logits_soft_cap", None) or None
        index = extract_layer_index(self.layer_name)
        self.state = StateLayer(cache, index, float(impl.scale), softcap)
        self.announce: Callable[[int], None] | None = None

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The backend whose metadata have each request's block, the same for any state."""
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        """Return the shapes of a block's tensors."""
        return tuple(shape for shape, _ in self.spec.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of a block's tensors."""
        return tuple(dtype for _, dtype in self.spec.values())

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the memory of all requests' blocks; block 0 is unused."""
        super().bind_kv_cache(kv_cache)
        tensors: Any = self.kv_cache
        self.state.blocks = dict(zip(self.spec, tensors, strict=True))
        if self.announce is not None:
            self.announce(kv_cache.shape[0] - 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Attend, score and evict for all requests of the step."""
        states = (query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads)
        query, key, value = (state.view(-1, heads, self.head_size) for state, heads in states)
        output = torch.zeros_like(query)
        metadata = get_forward_context().attn_metadata
        if metadata is not None:  # None in the profiling run
            layer_metadata = metadata[self.layer_name]
            index = [
                block or -1 for block in layer_metadata.state_indices_tensor.tolist()
            ]  # block 0 is unused
            starts, lengths = (
                layer_metadata.query_start_loc.tolist(),
                layer_metadata.seq_lens.tolist(),
            )
            count = starts[-1]
            query, key, value = (state[:count] for state in (query, key, value))
            output[:count] = self.state.run(query, key, value, starts, lengths, index)
        output = output.to(output_dtype or query.dtype)
        return output.view(output_shape or (-1, self.num_heads * self.head_size))


def replace_attention(model: nn.Module, vllm_config: Any) -> None:
    """Replace every attention layer of a model by H2O; mutates it."""
    cache = parse(vllm_config.additional_config)
    assert cache is not None
    layers = vllm_config.compilation_config.static_forward_context
    attentions = {
        name: module for name, module in model.named_modules() if isinstance(module, Attention)
    }
    replacements: dict[str, H2OAttention] = {}
    rotation: Rotation | None = None
    model_config = vllm_config.model_config
    config = model_config.hf_text_config
    for name, attention in attentions.items():
        _check_layer(attention)
        replacements[name] = H2OAttention(attention, cache, model_config.dtype)
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        setattr(parent, child, replacements[name])
        state = replacements[name].state
        if state.rule.observes is Sees.QUERIES:
            rotary: Any = parent.rotary_emb
            rotation = rotation or model_rotation(config, model_config.dtype, rotary.is_neox_style)
            state.rotates = rotation
        layers[attention.layer_name] = replacements[name]
    for name, other in layers.items():
        if isinstance(other, AttentionLayerBase) and not isinstance(other, H2OAttention):
            raise ValueError(
                f"h2okv: layer {name} is a {type(other).__name__}, but H2O needs full "
                "attention in all layers; leave the h2okv setting out."
            )
    if not replacements:
        raise ValueError("h2okv: the model has no attention layer; leave the h2okv setting out.")
    first = next(iter(replacements.values()))
    size = len(replacements) * block_bytes(first.spec)
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    first.announce = lambda count: logger.info(summary(cache, size, count, max_num_seqs))


def _check_layer(attention: Attention) -> None:
    """Refuse attention other than softmax over all earlier tokens."""
    obstacles = {
        f"is a {type(attention).__name__}": type(attention) is not Attention,
        f"has a sliding window of {attention.sliding_window}": attention.sliding_window is not None,
        "has sinks in its softmax": attention.has_sink,
        f"is {attention.attn_type} attention": attention.attn_type != "decoder",
        "has ALiBi": getattr(attention.impl, "alibi_slopes", None) is not None,
        "shares another layer's keys": attention.kv_sharing_target_layer_name is not None,
        "has values of another size": attention.head_size_v != attention.head_size,
        f"has a {attention.kv_cache_dtype} cache": attention.kv_cache_dtype not in UNQUANTISED,
    }
    for obstacle, is_so in obstacles.items():
        if is_so:
            raise ValueError(
                f"h2okv: attention layer {attention.layer_name} {obstacle}, which H2O does not "
                "model; leave the h2okv setting out."
            )


def __getattr__(name: str) -> type[nn.Module]:
    """Make an architecture's class with H2O from vLLM's, on first access."""
    if not name.startswith(PREFIX):
        raise AttributeError(name)
    base: Any = ModelRegistry.models[name.removeprefix(PREFIX)].load_model_cls()

    def init(self: nn.Module, *, vllm_config: Any, prefix: str = "") -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        replace_attention(self, vllm_config)

    cls = type(name, (base,), {"__init__": init, "__module__": __name__})
    globals()[name] = cls
    return cls
