"""What a server does with its memory, and what it adds to an engine's config: shared states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from h2okv.cache import H2OCache
from h2okv.cache.linear_states import continues_blocks, continues_prompts
from h2okv.cache.slot_pool import check_poolable
from h2okv.cache.support import can_score_spans, window_by_length
from h2okv.config import SPAN
from h2okv.console import format_bytes
from h2okv.engine.config import DEFAULT_STATES, EngineConfig
from h2okv.engine.memory import (
    MemoryModel,
    ServingMemory,
    available_bytes,
    data_bytes,
    give_memory_back,
)
from h2okv.engine.prefix_cache import PrefixFolder
from h2okv.models.loading import Described, describe, loaded_dtype, weight_bytes
from h2okv.models.packed_linear import limit_kernels
from h2okv.prompts.readers import UNLIMITED, FieldError, PromptLimits

_DEFAULT_PROMPT = 8192
_DEFAULT_SEQS = 64
_FREE_FRACTION = 0.8
_MIB = 1 << 20
_LOADING = 20 << 20  # that loading leaves beside the weights: the model's code, stacks of threads


def prompt_limits(config: EngineConfig, described: Described) -> PromptLimits:
    """Return the limits of an engine's prompts."""
    # Frequencies that depend on the longest sequence of the batch (dynamic scaling, LongRoPE)
    # are the same for all sequences below that length.
    context, window = described.context, window_by_length(described.config)
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
    longest = requested or min(context or _DEFAULT_PROMPT, _DEFAULT_PROMPT)
    return PromptLimits(described.vocab_size, max_context, longest)


def with_states(
    config: EngineConfig, evict_every: int | str | None
) -> tuple[EngineConfig, str | None]:
    """Return a config whose prompts share states, or a note that they do not.

    Args:
        config: Without `CacheConfig.evict_every`.
        evict_every: Tokens between two evictions; ``None`` for `SPAN`, where the policy allows it;
            0 for an eviction after each block, and such as ``"prompt+32"``, leave no states.

    Raises:
        ValueError: If the user asked for states that there cannot be.
    """
    cache, reason = config.cache, None
    if cache.is_full:  # which the engine refuses
        return config, None
    if evict_every == 0 or isinstance(evict_every, str):
        reason = f"--cache every={evict_every}"
        cache = cache.cut_every(evict_every)
    elif evict_every is None and config.prefix_cache == 0:
        reason = "--prefix-cache 0"
        cache = cache.cut_every(cache.usual_cuts)
    elif evict_every is None and not can_score_spans(cache):
        reason = f"--policy {cache.policy}, which depends on where a prompt is cut"
    if reason is None:
        cache = cache.cut_every(evict_every or SPAN)
        if config.prefix_cache != 0:
            return replace(config, cache=cache), None
        reason = "--prefix-cache 0"
    for option in ("prefix_cache", "prefix_cache_folder"):
        if getattr(config, option):
            flag = f"--{option.replace('_', '-')}"
            raise ValueError(f"{flag} has no effect with {reason}; leave one of them out.")
    return replace(config, cache=cache), f"prefix cache: off with {reason}"


def in_tokens(config: EngineConfig, model: str) -> tuple[EngineConfig, str | None]:
    """Return a config that shares states with its budget in tokens, and a note if it was not.

    A state serves prompts of any length, so its budget cannot be a fraction of one of them.
    """
    cache = config.cache
    if cache.chunk is None or config.prefix_cache == 0 or not cache.budget.is_relative:
        return config, None
    described = describe(model)
    kind = described.config.get_text_config(decoder=True).model_type
    if not continues_blocks(kind):
        return config, f"prefix cache: off, as linear layers of model type {kind!r} forget states"
    longest = prompt_limits(config, described).max_prompt_tokens
    tokens = cache.budget.resolve(longest)
    note = (
        f"prefix cache: on, so every text gets the entries of the longest prompt, {tokens.heavy} "
        f"heavy and {tokens.recent} recent ({cache.budget_label} of {longest:,} tokens)"
    )
    cache = replace(cache, heavy=tokens.heavy, recent=tokens.recent)
    return replace(config, cache=cache), note


class MemoryShare(NamedTuple):
    """How much of a device's memory a server may use, and what for."""

    promised: int  # bytes, weights included
    used: int  # bytes of them before there are slots
    states: int  # bytes of states that later prompts continue from
    num_seqs: int
    verify: int = 0  # bytes of a full cache, which reads answers again


def share_memory(
    config: EngineConfig, memory: ServingMemory, device: torch.device, unloaded: int = 0
) -> MemoryShare:
    """Return what fits into memory; ``unloaded`` are the bytes of weights that are still to come.

    Raises:
        ValueError: If not even one sequence fits, or not even one state into a given prefix_cache.
    """
    used, limit, count = unloaded, _DEFAULT_SEQS, config.max_num_seqs
    free = max((available_bytes(device) or 0) - unloaded, 0)
    promised = int(_FREE_FRACTION * free) + unloaded
    if config.memory is not None:
        promised, limit = config.memory, UNLIMITED
        if device.type == "cpu":
            give_memory_back()
        on_gpu = device.type == "cuda"
        used += torch.cuda.memory_allocated(device) if on_gpu else data_bytes() or 0
    elif device.type == "cpu":
        limit_kernels()
    states = config.prefix_cache or 0
    if not config.caches_prefixes:
        states = 0
    elif config.prefix_cache is None:
        states = min(DEFAULT_STATES, max(promised - used, 0) // 4)
    elif 0 < states < memory.state:
        raise ValueError(
            f"prefix_cache of {format_bytes(states)} has no room for a state of"
            f" {format_bytes(memory.state)}; give more, lower the budget, or give 0 for none."
        )
    verify = 0
    if config.memory is not None and config.verify:
        verify = min(memory.verify, max(promised - used, 0) // 8)
    # A number that is given may take all that is free now, where no amount is.
    takes_all = count is not None and config.memory is None
    num_seqs = memory.num_seqs(free if takes_all else promised - used - states - verify)
    if num_seqs < 1 and not takes_all:
        needed = used + states + verify + memory.minimum
        raise ValueError(
            f"memory of {promised / _MIB:.0f} MiB has no room for a single sequence; give "
            f"{needed / _MIB + 1:.0f} MiB, or lower the budget, max_prompt_tokens or "
            "max_prefill_tokens."
        )
    if count is not None and count > num_seqs > 0:
        needed = memory.prefill + count * (memory.sequence + memory.step)
        raise FieldError(
            ("max_num_seqs",),
            f"={count} needs {format_bytes(needed)}, and memory has room for {num_seqs:,}; give"
            " no more, or lower the budget or max_prompt_tokens",
        )
    return MemoryShare(promised, used, states, count or min(num_seqs, limit), verify)


def config_for(config: EngineConfig, cache: H2OCache) -> EngineConfig:
    """Return the config for a model's caches: no prefixes where no prompt continues from a state.

    Raises:
        ValueError: If the model's sequences cannot come and go, or an option needs what it cannot.
    """
    check_poolable(cache)
    model_type = cache.config.model_type
    options = ("prefix_cache", "prefix_cache_folder")
    if continues_prompts(cache):
        for name in options:
            if getattr(config, name) and not config.caches_prefixes:
                raise ValueError(
                    f"{name} is for states of prompts, and this config keeps none; give evict_every"
                    " and a budget in tokens, and no prefix_cache of 0."
                )
        return config
    if named := [name for name in options if getattr(config, name)]:
        raise ValueError(
            f"{named[0]}: a prompt would continue from a state, which linear layers of model type"
            f" {model_type!r} forget in transformers when several tokens follow; leave it out."
        )
    return replace(config, prefix_cache=0)


@dataclass(frozen=True)
class ServingPlan:
    """How many users fit, by arithmetic, before any weights are loaded; sizes in bytes."""

    share: MemoryShare
    memory: ServingMemory
    weights: int
    entries: float  # of a sequence, and
    span: int  # tokens until it evicts again
    longest: int  # tokens of the longest text
    full_sequence: int  # a full cache of it
    full_seqs: int  # that the same memory holds
    folder: PrefixFolder | None  # that keeps states over a restart

    def to_text(self) -> str:
        """Return the plan in lines for people."""
        share, memory = self.share, self.memory
        together = format_bytes(share.num_seqs * memory.sequence)
        temporaries = memory.prefill + share.num_seqs * memory.step
        lines = [
            f"memory: {format_bytes(share.promised)}, of which the process takes"
            f" {format_bytes(share.used - self.weights)} and the weights"
            f" {format_bytes(self.weights)}",
            f"sequences: {share.num_seqs:,} of {self.entries:,g} entries and {self.span} more until"
            f" the next eviction, {format_bytes(memory.sequence)} each, at most {together}"
            " together",
            f"temporaries: {format_bytes(temporaries)}",
            "prefix cache: none",
        ]
        if share.states:
            count, size = share.states // memory.state, format_bytes(memory.state)
            lines[-1] = f"prefix cache: {format_bytes(share.states)}, {count:,} states of {size}"
        if self.folder is not None:
            lines.append(f"prefix cache folder: {self.folder}")
        lines.append(
            f"a full cache of {self.longest:,} tokens takes {format_bytes(self.full_sequence)};"
            f" the same memory holds {self.full_seqs:,} of them"
        )
        return "\n".join(lines)


def plan_serving(
    config: EngineConfig, model: str, dtype: torch.dtype | None, device: torch.device
) -> ServingPlan:
    """Say what an engine would do with its memory, without loading the weights.

    Raises:
        ValueError: If the engine would refuse the config, or not even one sequence fits.
    """
    described = describe(model)
    stored = getattr(described.config.get_text_config(decoder=True), "dtype", None)
    dtype = loaded_dtype(described, dtype, device, config.weight_bits) or stored or torch.float32
    cache_config = config.cache.before_measuring
    cache = H2OCache.from_config(described.config, cache_config)
    config = config_for(config, cache)
    limits = prompt_limits(config, described)
    longest = limits.max_prompt_tokens
    budgets = cache.layer_entries_for(longest)
    model_memory = MemoryModel(described.config, cache, dtype)
    memory = model_memory.serving(
        budgets,
        longest,
        config.max_prefill_tokens,
        reads_images=described.image_encoder.reads_images,
    )
    weights = weight_bytes(described, dtype, config.weight_bits)
    share = share_memory(config, memory, device, weights + _LOADING * (device.type == "cpu"))
    text = limits.max_context or longest
    full = model_memory.full_bytes(text)
    free = share.promised - share.used - memory.prefill
    full_seqs = max(0, free // (full + model_memory.decode_bytes(1, text)))
    return ServingPlan(
        share, memory, weights, max(budgets), cache_config.span, text, full, full_seqs,
        PrefixFolder.of(config),
    )  # fmt: skip
