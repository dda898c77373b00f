"""The tokens that end a text."""

from __future__ import annotations

from transformers import PreTrainedModel


def end_token_ids(model: PreTrainedModel) -> set[int]:
    """Tells which tokens end an answer."""
    config = model.generation_config or model.config
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, (list, tuple)) else {int(ids)}
