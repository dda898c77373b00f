"""What transformers does to a row of logits before a token is chosen."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel


def settled_config(
    model: PreTrainedModel,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
) -> GenerationConfig:
    """Makes a generation config of a model's own and what is asked for.

    Args:
        model: Its own config is copied; unchanged.
        temperature: 0 takes the likeliest token.
        top_p: 1 for no limit.
        top_k: 0 for no limit.
        min_p: 0 for no limit.
        repetition_penalty: ``None`` for the model's own.

    Returns:
        What `processors_of` takes.
    """
    config: Any = copy.deepcopy(model.generation_config)
    draws = temperature > 0
    config.do_sample = draws
    config.temperature = temperature if draws else None
    config.top_p = top_p if draws else None
    config.top_k = top_k or None if draws else None
    config.min_p = min_p or None if draws else None
    if repetition_penalty is not None:
        config.repetition_penalty = repetition_penalty
    config.num_beams = 1
    ends = sorted(end_tokens(model))
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    settled: GenerationConfig = config
    return settled


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Reads the tokens that end a model's texts."""
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])


def processors_of(
    model: PreTrainedModel, config: GenerationConfig, prompt_length: int, device: str = "cpu"
) -> LogitsProcessorList:
    """Makes the processors of ``generate``.

    Args:
        model: Whose.
        config: From `settled_config`.
        prompt_length: Tokens of the prompt, which some of them know.
        device: Where the logits will be.

    Returns:
        Them, in the order in which ``generate`` runs them.
    """
    transformers: Any = model
    made: LogitsProcessorList = transformers._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_length,
        device=device,
        model_kwargs={},
    )
    return made
