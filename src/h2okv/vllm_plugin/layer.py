"""Attention layers on H2O states, and the models that have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from h2okv.cache.rope import Rotation
from h2okv.config import CacheConfig
from h2okv.ops.reference import AttentionSpec
from h2okv.policy import Inputs
from h2okv.vllm_plugin.batch import Batch
from h2okv.vllm_plugin.settings import UNQUANTISED, parse, summary
from h2okv.vllm_plugin.state import LayerShape, StateLayer, StatePool, model_rotation

PREFIX = "H2O"
"""Prefix of an architecture's name for its version with H2O."""
logger = init_logger("vllm.h2okv")  # a child of vLLM's logger, with its level and format


# --- a step's metadata ----------------------------------------------------------------------------


class H2OBackend(AttentionBackend):
    """Tells vLLM how a step's metadata are made; the attention itself is the layers'."""

    @staticmethod
    def get_name() -> str:
        """Return a name for logs."""
        return "H2O"

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """Return what makes the metadata."""
        return MetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Tell that a request has a state, and no page of keys for each token."""
        return True


class MetadataBuilder(AttentionMetadataBuilder[Batch]):
    """Makes a step's `Batch` for all layers, of what the host knows anyway."""

    # As vLLM's own states: a batch of single tokens may be one CUDA graph, as spans end before the
    # next step. No GPU has run it.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # single tokens come first

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.pool: StatePool = layers[layer_names[0]].pool
        is_aligned = kv_cache_spec.mamba_cache_mode == "align"
        self.block_size = kv_cache_spec.block_size if is_aligned else None
        # A recorded graph reads the same memory in every step.
        room = vllm_config.scheduler_config.max_num_seqs
        self._seen, self._index = torch.zeros(2, room, dtype=torch.int64, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:
        """Return the step's requests; evicts where the last step has ended spans."""
        common: CommonAttentionMetadata = common_attn_metadata
        lengths = common.seq_lens_cpu_upper_bound  # exact, as there is no speculation
        lengths = common.seq_lens.cpu() if lengths is None else lengths
        batch = Batch.of(
            common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            lengths[: common.num_reqs].tolist(),
            common.block_table_tensor[: common.num_reqs],
            self.pool,
            self.block_size,
        )
        if not batch.chunks and self.device.type != "cpu":
            self._pad(batch, common.num_reqs)
        return batch

    def _pad(self, batch: Batch, count: int) -> None:
        """Put a batch of single tokens where a graph reads it; the others are padding."""
        used = len(batch.index)
        for name, memory in (("seen", self._seen), ("index", self._index)):
            memory[:used] = getattr(batch, name)
            memory[used:count] = 0  # the block that vLLM uses for nothing
            setattr(batch, name, memory[:count])
        batch.rows = slice(0, count)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Batch:
        """Return a batch of single tokens, all of them padding."""
        count, none = common_attn_metadata.num_reqs, self._index[:0]
        batch = Batch([], slice(0, 0), none, none, None, 0, count)
        self._pad(batch, count)
        return batch


@dataclass(frozen=True, kw_only=True)
class StateSpec(MambaSpec):
    """What a request's block holds. Its mode is here alone, as this plug-in copies states itself.

    With ``mamba_cache_mode`` in vLLM's own configuration the runner would do it, by a Triton kernel
    that a CPU does not have.
    """

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes of a request: two blocks while one state becomes the next."""
        return self.page_size_bytes * (2 if self.mamba_cache_mode == "align" else 1)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Return the columns of the block table."""
        return -(-max_len // self.block_size) if self.mamba_cache_mode == "align" else 1


# --- a layer --------------------------------------------------------------------------------------


class H2OAttention(nn.Module, MambaBase):
    """Replaces an attention layer. One layer has the block of all, which vLLM sees as Mamba's."""

    def __init__(self, attention: Attention, state: StateLayer) -> None:
        super().__init__()
        self.layer_name = attention.layer_name
        self.num_heads, self.head_size = attention.num_heads, attention.head_size
        self.num_kv_heads = attention.num_kv_heads
        self.state = state
        self.owner = self.layer_name  # the layer whose metadata are all layers'
        self.pool: StatePool | None = None  # of the owner
        self.announce: Callable[[int], None] | None = None

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The nearest of vLLM's own kinds."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return what makes a step's metadata."""
        return H2OBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a block's tensors."""
        return () if self.pool is None else self.pool.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of a block's tensors."""
        return () if self.pool is None else self.pool.dtypes

    def get_kv_cache_spec(self, vllm_config: Any) -> StateSpec | None:
        """Return what a request's block holds; ``None`` where another layer has it."""
        if self.pool is None:
            return None
        caching = vllm_config.cache_config
        return StateSpec(
            shapes=self.get_state_shape(),
            dtypes=self.get_state_dtype(),
            block_size=caching.mamba_block_size,
            mamba_type=self.mamba_type,
            mamba_cache_mode="align" if caching.enable_prefix_caching else "none",
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the memory of all requests' blocks; block 0 is unused."""
        super().bind_kv_cache(kv_cache)
        assert self.pool is not None
        self.pool.bind(kv_cache.squeeze(dim=(1, 2)))
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
        output = torch.empty_like(query)
        torch.ops.vllm.h2o_attention(query, key, value, output, self.layer_name)
        output = output.to(output_dtype or query.dtype)
        return output.view(output_shape or (-1, self.num_heads * self.head_size))


def h2o_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Run a layer by its name; the operation at which vLLM splits what it compiles."""
    context = get_forward_context()
    layer = context.no_compile_layers[layer_name]
    metadata: Any = context.attn_metadata
    if metadata is None:  # the profiling run
        output.zero_()
        return
    batch: Batch = metadata[layer.owner]
    batch.run(layer.state, query, key, value, output)


def _h2o_attention_fake(*arguments: Any) -> None:
    """Compute nothing, for a compiler that asks for shapes."""


direct_register_custom_op(
    "h2o_attention", h2o_attention, mutates_args=["output"], fake_impl=_h2o_attention_fake
)


# --- a model --------------------------------------------------------------------------------------


def replace_attention(model: nn.Module, vllm_config: Any) -> None:
    """Replace every attention layer of a model by H2O; mutates it."""
    cache = parse(vllm_config.additional_config)
    assert cache is not None
    layers = vllm_config.compilation_config.static_forward_context
    attentions = {
        name: module for name, module in model.named_modules() if isinstance(module, Attention)
    }
    if not attentions:
        raise ValueError("h2okv: the model has no attention layer; leave the h2okv setting out.")
    rotation: Rotation | None = None
    model_config = vllm_config.model_config
    replacements = []
    for number, (name, attention) in enumerate(attentions.items()):
        _check_layer(attention)
        replacement = H2OAttention(attention, _state_of(attention, number, cache, vllm_config))
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        setattr(parent, child, replacement)
        if replacement.state.rule.effective_inputs is Inputs.QUERIES:
            rotary: Any = parent.rotary_emb
            config, in_halves = model_config.hf_text_config, rotary.is_neox_style
            rotation = rotation or model_rotation(config, model_config.dtype, in_halves)
            replacement.state.rotates = rotation
        layers[attention.layer_name] = replacement
        replacements.append(replacement)
    for name, other in layers.items():
        if isinstance(other, AttentionLayerBase) and not isinstance(other, H2OAttention):
            raise ValueError(
                f"h2okv: layer {name} is a {type(other).__name__}, but H2O needs full "
                "attention in all layers; leave the h2okv setting out."
            )
    owner = replacements[0]
    owner.pool = StatePool([replacement.state for replacement in replacements])
    for replacement in replacements:
        replacement.owner = owner.layer_name
    size, max_num_seqs = owner.pool.block_bytes, vllm_config.scheduler_config.max_num_seqs
    caching = vllm_config.cache_config.enable_prefix_caching
    owner.announce = lambda count: logger.info(summary(cache, size, count, max_num_seqs, caching))


def _state_of(
    attention: Attention, number: int, cache: CacheConfig, vllm_config: Any
) -> StateLayer:
    """Make the state of an attention layer on this rank."""
    parallel = vllm_config.parallel_config
    shape = LayerShape(
        number, attention.num_heads, attention.num_kv_heads, attention.head_size,
        vllm_config.model_config.dtype,
        get_tensor_model_parallel_rank(), parallel.tensor_parallel_size,
    )  # fmt: skip
    impl: Any = attention.impl
    softcap = getattr(impl, "logits_soft_cap", None) or None
    return StateLayer(cache, shape, AttentionSpec(float(impl.scale), softcap))


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
