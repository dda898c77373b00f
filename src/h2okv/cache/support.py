"""Which models H2O can reach, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REFUSED = {
    "falcon": "it computes attention itself (and ALiBi inside it), not through transformers' "
    "AttentionInterface",
    "bloom": "it computes attention with ALiBi itself, not through transformers' "
    "AttentionInterface",
    "mpt": "it computes attention with ALiBi itself, not through transformers' "
    "AttentionInterface",
    "gpt_oss": "its softmax has a learned sink logit in every head, which the scores do not model",
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
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and H2O is defined for decoder-only models"
    if text_config.model_type in REFUSED:
        return REFUSED[text_config.model_type]
    for candidate in (config, text_config):
        # Remote-code models are not in the mapping; nothing is known about them in advance.
        if type(candidate) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(candidate)]
            if not model_class._can_set_attn_implementation():
                return "it computes attention itself, not through transformers' AttentionInterface"
    return None
