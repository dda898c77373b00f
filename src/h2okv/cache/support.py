"""Which models and options are supported."""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from h2okv.cache.argument import CACHE
from h2okv.cache.rope import BY_LENGTH, PositionRule
from h2okv.config import KV_BITS, CacheConfig
from h2okv.console import warn
from h2okv.measures import measured
from h2okv.ops.quant import KeyTransform
from h2okv.policy import Inputs, Rule, get_rule

_REASONS = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
"""Model types that are known not to work, with the reason."""
_OWN_ATTENTION, _INDEXER = REFUSED["gptj"], REFUSED["minimax_m3_vl_text"]


def check_model(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Refuses a model, or a config, that H2O cannot serve exactly.

    Args:
        model: a loaded model or its config.

    Raises:
        ValueError: naming the model type and the reason.
    """
    config = config_of(model)
    text_config = config.get_text_config(decoder=True)
    reason = _refusal(config, text_config)
    if reason is not None:
        kind = (config if config.model_type in REFUSED else text_config).model_type
        raise ValueError(
            f"model type {kind!r} is not supported: {reason}; "
            "use transformers' own cache for it, or a model of docs/support-table.md."
        )


def auto_model(config: PreTrainedConfig) -> Any:
    """Return the class that makes a config's model: of text, or of images and text."""
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def check_compiled(model: object) -> None:
    """Warn of a forward that torch.compile would trace for prompts, layer by layer."""
    inner = {} if isinstance(model, PreTrainedConfig) else vars(unwrap(model))
    is_compiled = hasattr(inner.get("forward"), "_torchdynamo_orig_callable")
    if is_compiled or inner.get("_compiled_call_impl") is not None:
        warn(
            "the model's forward is compiled, which takes minutes for a prompt of an H2OCache; give"
            " a model as it was loaded, and compile its steps by h2okv.enable(model, compile=True)."
        )


def unwrap(model: object) -> PreTrainedModel:
    """Return the model inside a wrapper of `torch.compile` or PEFT."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        _check_adapters(inner)
        if "_orig_mod" in getattr(inner, "_modules", {}):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            raise ValueError(
                f"model={type(model).__name__} is not a model of transformers; give a "
                "PreTrainedModel, or one that torch.compile or PEFT made of it."
            )
    return inner


def check_callers() -> None:
    """Refuse a forward through PEFT's prompt learning, however the cache was built.

    The model itself does not know the wrapper whose tokens it gets, so the callers are asked.
    """
    frame = sys._getframe() if "peft" in sys.modules else None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("peft."):
            _check_adapters(frame.f_locals.get("self"))
        frame = frame.f_back


def _check_adapters(model: object) -> None:
    """Refuse PEFT's prompt learning: prefix tuning, prompt tuning, p-tuning."""
    adapters = getattr(model, "active_peft_config", None)
    is_prompt_learning = getattr(adapters, "is_prompt_learning", False)
    if is_prompt_learning and not getattr(model, "_adapters_disabled", False):
        kind = str(getattr(adapters.peft_type, "value", adapters.peft_type))
        raise ValueError(
            f"prompt learning (PEFT's {kind}) puts tokens or keys of its own before the text, and "
            "with some versions of transformers again at every step; an H2OCache would evict text "
            "for them. Use transformers' own cache for this model, or LoRA or IA3."
        )


def config_of(model: object) -> PreTrainedConfig:
    """Return the config itself, or that of a model."""
    return model if isinstance(model, PreTrainedConfig) else unwrap(model).config


def _refusal(config: PreTrainedConfig, text_config: PreTrainedConfig) -> str | None:
    """Return the reason why a model cannot be served, or ``None``."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and H2O is defined for decoder-only models"
    for candidate in (text_config, config):
        if candidate.model_type in REFUSED:
            return REFUSED[candidate.model_type]
    if not getattr(text_config, "is_causal", True):
        return "its config says is_causal=False, and H2O is defined for causal attention"
    if size_of(text_config, "kv_lora_rank") and CACHE != "cache":
        return (
            "its attention (MLA) expands latents, of which transformers tells the cache and the "
            "attention enough from version 5.24 on"
        )
    sharing = getattr(text_config, "kv_sharing_modes", None) or ()
    # Gemma 4 calls layers whose keys another one may read "store", where none does too.
    if getattr(text_config, "num_kv_shared_layers", 0) or "reuse" in sharing:
        return (
            "some of its layers attend to the keys of another layer, which evicts by its own scores"
        )
    if "indexed_attention" in (getattr(text_config, "layer_types", None) or ()):
        return _INDEXER
    for candidate in (config, text_config):
        # Remote-code models are not in the mapping; nothing is known about them in advance.
        if type(candidate) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(candidate)]
            if not model_class._can_set_attn_implementation():
                return _OWN_ATTENTION
    return None


def size_of(text_config: PreTrainedConfig, name: str) -> Any:
    """Return a size in a config, the largest where layers differ (Gemma 4); ``None`` without it."""
    try:
        return getattr(text_config, name, None)
    except RuntimeError:
        layers: Any = text_config
        return max(getattr(config, name) for config in layers.per_layer_config)


def latent_sizes(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Return R and r, the sizes of an MLA model's latents and of its keys' rotated part."""
    text_config = config.get_text_config(decoder=True)
    rank = size_of(text_config, "kv_lora_rank")
    return (rank, size_of(text_config, "qk_rope_head_dim")) if rank else None


def context_window(config: PreTrainedConfig) -> int | None:
    """Return the positions that a model was trained on; ``None`` without a limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def window_by_length(config: PreTrainedConfig) -> int | None:
    """Return the length of text up to which a model's rotation does not change."""
    # Dynamic scaling and LongRoPE take other frequencies beyond it, for all rows of the batch.
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [rope, *(rope_kind for rope_kind in rope.values() if isinstance(rope_kind, dict))]
    lengths = [
        rope_kind.get("original_max_position_embeddings")
        or getattr(text_config, "original_max_position_embeddings", None)
        or context_window(config)
        for rope_kind in kinds
        if rope_kind.get("rope_type") in BY_LENGTH
    ]
    return min((length for length in lengths if length), default=None)


def check_positions(config: PreTrainedConfig, positions: str, rule: Rule) -> None:
    """Refuse positions that the model or the policy does not support."""
    text_config = config.get_text_config(decoder=True)
    rotary = bool(getattr(text_config, "rope_parameters", None))
    kind = text_config.model_type
    if positions == "rolling" and not rotary:
        raise ValueError(
            f"positions='rolling': model type {kind!r} has no rotary positions (RoPE). Learned "
            "positions are part of what a key was made from and cannot be moved afterwards; use "
            "positions='clamped', or 'original' within the context window."
        )
    if positions == "rolling" and "mrope_section" in (text_config.rope_parameters or {}):
        raise ValueError(
            f"positions='rolling': model type {kind!r} places tokens of an image on three axes"
            " (M-RoPE), which one rank cannot say; use positions='original'."
        )
    if positions == "rolling" and not rule.evicts:
        raise ValueError(
            f"positions='rolling': policy={rule.name!r} evicts nothing, so ranks would equal "
            "original positions; use positions='original'."
        )
    if positions == "clamped" and (rotary or context_window(config) is None):
        raise ValueError(
            f"positions='clamped': model type {kind!r} has no learned positions to stop at; use "
            "positions='rolling' for rotary positions, or 'original'."
        )


# Options that a rule rules out by what it sees, with the reason.
_EXCLUDES = {
    (Inputs.WINDOW, "evict_every"): "decides once, at the end of the prompt, and needs it as one"
    " block",
    (Inputs.WINDOW, "rolling"): "keeps every token after the prompt, so ranks would leave the"
    " context window too",
    (Inputs.KEYS, "rolling"): "compares keys, and where positions roll those of equal tokens differ"
    " by rounding alone",
}


def check_rule(rule: Rule, position_rule: PositionRule) -> None:
    """Refuse options that contradict what a rule declares, and scorings that it ignores."""
    name, evict_every = f"policy={rule.name!r}", position_rule.evict_every
    is_given = {"evict_every": evict_every is not None, "rolling": position_rule.rolls}
    shown = {
        "evict_every": f"leave out evict_every={evict_every}",
        "rolling": "use positions='original'",
    }
    for (inputs, option), reason in _EXCLUDES.items():
        if rule.inputs is inputs and is_given[option]:
            raise ValueError(f"{name} {reason}; {shown[option]}, or use policy='h2o'.")
    if rule.grows and (position_rule.rolls or rule.inputs is Inputs.WINDOW or not rule.evicts):
        option = "positions='rolling'" if position_rule.rolls else name
        raise ValueError(f"{option} excludes of=seen (grows=True); leave one of them out.")
    if (evict_every or 1) > 1 and not rule.scores_spans:
        raise ValueError(
            f"{name} looks at each query or block by itself, and evict_every={evict_every} must"
            " not depend on where a text is cut; leave it out, or use policy='h2o'."
        )
    if rule.scoring.name != "sum" and (rule.inputs is Inputs.WINDOW or not rule.uses_scores):
        reason = "does not look at scores"
        if rule.inputs is Inputs.WINDOW:
            reason = "counts the attention of its own window of queries"
        raise ValueError(
            f"scoring={rule.scoring.name!r} has no effect with {name}, which {reason}; leave it "
            "out, or use policy='h2o'."
        )


def can_score_spans(cache: CacheConfig) -> bool:
    """Return whether scores can depend on the text alone, as ``evict_every`` needs."""
    return get_rule(cache.policy, cache.seed, cache.scoring, cache.decay).scores_spans


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Return a layer's KV heads; 1 for latents."""
    text = config.get_text_config(decoder=True)
    heads = size_of(text, "num_key_value_heads") or text.num_attention_heads
    return 1 if latent_sizes(config) else int(heads)


def check_layer_budgets(
    cache: CacheConfig, rule: Rule, config: PreTrainedConfig, num_layers: int
) -> None:
    """Refuse budgets of another model, or by head where heads must keep equal numbers."""
    count = num_layers if cache.layer_budgets is None else len(cache.layer_budgets)
    if count != num_layers:
        raise ValueError(
            f"layer_budgets has {count} factors, and the model {num_layers} layers with H2O"
            " entries; give one for each."
        )
    if not cache.is_by_head:
        return
    heads = num_kv_heads(config)
    counts = sorted(
        {len(factors) for factors in cache.layer_budgets or () if isinstance(factors, Sequence)}
    )
    if counts != [heads]:
        raise ValueError(
            f"layer_budgets has lists of {' and '.join(map(str, counts))} factors, and layers of"
            f" this model have {heads} KV heads; give one for each."
        )
    # Heads of a layer share what is protected, so no factor may change it.
    by_layer = [cache.head_budgets(index) or () for index in range(len(cache.layer_budgets or ()))]
    protected = {
        (budget.sink, budget.recent, budget.num_static)
        for budgets in by_layer
        for budget in (rule.allocate_budget(head.resolve(1000)) for head in budgets)
    }
    by_scores = rule.ranks_by_scores and rule.evicts
    excluded = {
        f"policy={cache.policy!r}": not by_scores or len(protected) > 1,
        f"positions={cache.positions!r}": cache.positions == "rolling",
    }  # fmt: skip
    for name, is_given in excluded.items():
        if is_given:
            raise ValueError(
                f"{name} needs heads with equal budgets, and layer_budgets has a factor for each;"
                " give one factor for each layer."
            )


def check_layers(
    config: PreTrainedConfig, layers: Sequence[object], num_scored: int, positions: PositionRule
) -> None:
    """Refuse a model without layers to evict from, or with layers without such positions."""
    name, kinds = config.model_type, ", ".join(sorted({type(layer).__name__ for layer in layers}))
    if not num_scored:
        problem = (
            f"has no full-attention layer (its cache layers: {kinds}), so there is nothing for H2O"
            " to evict"
        )
        if "FullAttention" in kinds:
            problem = (
                f"caches attention and a linear state in one layer ({kinds}), of which H2O cannot"
                " evict the attention alone"
            )
        raise ValueError(f"model type {name!r} {problem}; use transformers' own cache.")
    if positions.rewrites and num_scored != len(layers):
        raise ValueError(
            f"positions={positions.positions!r} would give the layers of model type {name!r} that"
            " are not full attention other positions too; use positions='original' for it."
        )


def measured_budgets(model: object, cache: CacheConfig) -> CacheConfig:
    """Replace ``layer_budgets="auto"``: measured for a model, even for a config alone."""
    if not isinstance(model, PreTrainedConfig):
        config: CacheConfig = measured("budgets", model, cache)
        return config
    if not cache.is_full:
        warn(
            "every head gets the same budget, as a config alone cannot be measured; give the model,"
            " H2OCache(model, ...), or layer_budgets of a file of h2okv eval layers --by-head, or"
            " layer_budgets='even' to say so."
        )
    return replace(cache, layer_budgets=None)


def transforms_keys(cache: CacheConfig, config: PreTrainedConfig) -> bool:
    """Tell whether a cache transforms keys before it packs them (`KeyTransform`)."""
    return KV_BITS.get(cache.kv_bits, (8,))[0] == 4 and latent_sizes(config) is None


def measured_keys(model: object, cache: CacheConfig) -> Mapping[int, KeyTransform]:
    """Return how each layer of a model transforms keys; empty if the cache does not."""
    if isinstance(model, PreTrainedConfig) or not transforms_keys(cache, config_of(model)):
        return {}
    transforms: Mapping[int, KeyTransform] = measured("keys", model, cache.positions == "rolling")
    return transforms


def warn_of_untransformed_keys() -> None:
    """Warn that a cache that knows only a config cannot transform keys."""
    warnings.warn(
        "kv_bits=4: keys are rounded without centering, which needs the model and costs models "
        "such as Qwen2.5 their text; give the model, H2OCache(model, kv_bits=4), or use kv_bits=6.",
        stacklevel=4,
    )
