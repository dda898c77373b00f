"""Which models H2O can reach, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from h2okv.policy import Policy

_OWN_ATTENTION = "it computes attention itself, not through transformers' AttentionInterface"
_ALIBI = f"{_OWN_ATTENTION}, and adds ALiBi biases to the logits there"
_SINK_LOGIT = "its softmax has a learned sink logit in every head, which the scores do not model"
_POSITION_BIAS = "it adds learned relative-position biases to the logits, which are not modelled"
_INDEXER = "an indexer of its own chooses the keys that a token sees, evicted ones included"
_HALF_MODEL = (
    "it is half of an encoder-decoder model, and its positions count padding, so that a padded row "
    "would not give what it gives alone"
)
_ENCODER = "it is an encoder, and H2O is defined for decoder-only models"
_LATENT = (
    "it caches one compressed latent for all heads (MLA), so that a head cannot drop a token that "
    "another one keeps"
)
_SHARED_KEYS = (
    "some of its layers attend to the keys of another layer, which evicts by its own scores"
)

REFUSED = {
    "bloom": _ALIBI,
    "falcon": f"{_OWN_ATTENTION} (some Falcon checkpoints with ALiBi)",
    "mpt": _ALIBI,
    "codegen": _OWN_ATTENTION,
    "git": _OWN_ATTENTION,
    "gpt_neo": _OWN_ATTENTION,
    "gptj": _OWN_ATTENTION,
    "xglm": _OWN_ATTENTION,
    "deepseek_v4": _SINK_LOGIT,
    "flint": _SINK_LOGIT,
    "gpt_oss": _SINK_LOGIT,
    "granite_swa": _SINK_LOGIT,
    "granitemoe_swa": _SINK_LOGIT,
    "hy_v4": _SINK_LOGIT,
    "mimo_v2_flash": _SINK_LOGIT,
    "inkling_text": _POSITION_BIAS,
    "inkling2_text": _POSITION_BIAS,
    "minimax_m3_vl_text": _INDEXER,
    "diffllama": "it attends twice to the same keys with different values, which would count every "
    "score twice",
    "doge": "it builds a mask of its own from the values of all tokens, evicted ones too",
    "jetmoe": "it repeats the keys after the cache has seen them, one copy for each expert",
    "minimax": "it accepts no cache but its own",
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "pegasus",
            "plbart",
            "whisper",
        ),
        _HALF_MODEL,
    ),
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        _ENCODER,
    ),
}
"""Model types that are known not to work, with the reason."""


def check_config(config: PreTrainedConfig) -> None:
    """Refuses a model that H2O cannot serve exactly.

    Args:
        config: the model's config.

    Raises:
        ValueError: naming the model type and the reason.
    """
    text_config = config.get_text_config(decoder=True)
    reason = _refusal(config, text_config)
    if reason is not None:
        raise ValueError(
            f"model type {text_config.model_type!r} is not supported: {reason}; "
            "use transformers' own cache for it, or a model of the README's support table."
        )


def check_model(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Refuses a model, or a config, that H2O cannot serve exactly.

    Args:
        model: a loaded model or its config.

    Raises:
        ValueError: naming the model type and the reason.
    """
    check_config(model.config if isinstance(model, PreTrainedModel) else model)


def _refusal(config: PreTrainedConfig, text_config: PreTrainedConfig) -> str | None:
    """The reason why a model cannot be served; ``None`` if nothing speaks against it."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and H2O is defined for decoder-only models"
    for candidate in (text_config, config):
        if candidate.model_type in REFUSED:
            return REFUSED[candidate.model_type]
    if not getattr(text_config, "is_causal", True):
        return "its config says is_causal=False, and H2O is defined for causal attention"
    if getattr(text_config, "kv_lora_rank", None):
        return _LATENT
    sharing = getattr(text_config, "kv_sharing_modes", None) or ()
    if getattr(text_config, "num_kv_shared_layers", 0) or any(sharing):
        return _SHARED_KEYS
    if "indexed_attention" in (getattr(text_config, "layer_types", None) or ()):
        return _INDEXER
    return None if _uses_interface(config, text_config) else _OWN_ATTENTION


def _uses_interface(config: PreTrainedConfig, text_config: PreTrainedConfig) -> bool:
    """Tells whether transformers can set the model's attention, as far as is known in advance."""
    for candidate in (config, text_config):
        # Remote-code models are not in the mapping; nothing is known about them in advance.
        if type(candidate) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(candidate)]
            if not model_class._can_set_attn_implementation():
                return False
    return True


def trained_window(config: PreTrainedConfig) -> int | None:
    """Tells how many positions a model was trained on.

    Args:
        config: the model's config.

    Returns:
        Tokens; ``None`` if the config does not say.
    """
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


_BY_LENGTH = ("dynamic", "longrope")


def window_by_length(config: PreTrainedConfig) -> int | None:
    """Tells up to which length a model turns its tokens alike, whatever the length.

    Dynamic scaling and LongRoPE take other frequencies in a forward with a longer text in it, for
    all rows of the batch; so texts of different length can share a batch only below that.

    Args:
        config: the model's config.

    Returns:
        Tokens; ``None`` if the length makes no difference.
    """
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    lengths = [
        part.get("original_max_position_embeddings")
        or getattr(text_config, "original_max_position_embeddings", None)
        or trained_window(config)
        for part in kinds
        if part.get("rope_type") in _BY_LENGTH
    ]
    return min((length for length in lengths if length), default=None)


def check_positions(config: PreTrainedConfig, positions: str, policy: Policy) -> None:
    """Refuses a way of placing entries that the model or the policy has not.

    Args:
        config: the model's config.
        positions: what the user asked for.
        policy: the eviction policy.

    Raises:
        ValueError: naming the reason and the remedy.
    """
    text_config = config.get_text_config(decoder=True)
    rotary = bool(getattr(text_config, "rope_parameters", None))
    kind = text_config.model_type
    if positions == "rolling" and not rotary:
        raise ValueError(
            f"positions='rolling': model type {kind!r} has no rotary positions (RoPE). Learned "
            "positions are part of what a key was made from and cannot be moved afterwards; use "
            "positions='clamped', or 'original' within the trained window."
        )
    if positions == "rolling" and not policy.evicts:
        raise ValueError(
            f"positions='rolling': policy={policy.name!r} evicts nothing, so that ranks are the "
            "places in the text; use positions='original'."
        )
    if positions == "clamped" and (rotary or trained_window(config) is None):
        raise ValueError(
            f"positions='clamped': model type {kind!r} has no learned positions to stop at; use "
            "positions='rolling' for rotary positions, or 'original'."
        )
