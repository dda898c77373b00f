"""What a server adds to an engine's config: states that later prompts continue from."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from h2okv.cache.support import can_score_spans, window_by_length
from h2okv.engine.config import EngineConfig
from h2okv.integration.loading import describe

SPAN = 256
"""Tokens between two evictions, where prompts share states and the user chose no number."""
_DEFAULT_PROMPT = 8192


def length_limits(
    config: EngineConfig, model_config: PreTrainedConfig, context: int | None
) -> tuple[int | None, int]:
    """Return the most tokens of a text, ``None`` for no limit, and those of a prompt."""
    # Frequencies that depend on the longest sequence of the batch (dynamic scaling, LongRoPE)
    # are the same for all sequences below that length.
    window = window_by_length(model_config)
    if window is not None:
        context = min(context or window, window)
    max_context = None if config.cache.positions == "rolling" else context
    requested = config.max_prompt_tokens
    if max_context is not None and requested is not None and requested > max_context:
        raise ValueError(
            f"max_prompt_tokens={requested} is more than the model's context of "
            f"{max_context}; lower it, or use positions='rolling'."
        )
    # A prompt that fills the context can still be scored (prompt_logprobs).
    return max_context, requested or min(context or _DEFAULT_PROMPT, _DEFAULT_PROMPT)


def with_states(config: EngineConfig, evict_every: int | None) -> tuple[EngineConfig, str | None]:
    """Return a config whose prompts share states, or a note that they do not.

    Args:
        config: Without `CacheConfig.evict_every`.
        evict_every: Tokens between two evictions; ``None`` for `SPAN`, where the policy allows it;
            0 for an eviction after each block, which leaves no states.

    Raises:
        ValueError: If the user asked for states that there cannot be.
    """
    cache, reason = config.cache, None
    if cache.is_full:  # which the engine refuses
        return config, None
    if evict_every == 0:
        reason = "--evict-every 0"
    elif evict_every is None and config.prefix_cache == 0:
        reason = "--prefix-cache 0"
    elif evict_every is None and not can_score_spans(cache):
        reason = f"--policy {cache.policy}, which depends on where a prompt is cut"
    if reason is None:
        config = replace(config, cache=replace(cache, evict_every=evict_every or SPAN))
        if config.prefix_cache != 0:
            return config, None
        reason = "--prefix-cache 0"
    if config.prefix_cache:
        raise ValueError(f"--prefix-cache has no effect with {reason}; leave one of them out.")
    return config, f"prefix cache: off with {reason}"


def in_tokens(config: EngineConfig, model: str) -> tuple[EngineConfig, str | None]:
    """Return a config that shares states with its budget in tokens, and a note if it was not.

    A state serves prompts of any length, so its budget cannot be a fraction of one of them.
    """
    cache = config.cache
    if cache.evict_every is None or config.prefix_cache == 0 or not cache.budget.is_relative:
        return config, None
    described = describe(model)
    _, longest = length_limits(config, described.config, described.context)
    tokens = cache.budget.resolve(longest)
    note = (
        f"prefix cache: on, so every text gets the entries of the longest prompt, {tokens.heavy} "
        f"heavy and {tokens.recent} recent ({cache.budget_label} of {longest:,} tokens)"
    )
    cache = replace(cache, heavy=tokens.heavy, recent=tokens.recent)
    return replace(config, cache=cache), note
