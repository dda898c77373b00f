"""The plug-in's settings, and the checks of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from h2okv import cache_spec
from h2okv.cache.rope import PositionRule
from h2okv.cache.support import check_layer_budgets, check_rule
from h2okv.config import SPAN, CacheConfig
from h2okv.policy import Inputs, Rule, get_rule
from h2okv.records import refusing

KEY = "h2okv"
"""The key of the settings in vLLM's ``additional_config``."""
EXAMPLE = '--additional-config \'{"h2okv": "h2o:512"}\''

FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "TransformersForCausalLM",
    "TransformersMoEForCausalLM",
)
"""vLLM's names of supported models; the last two are any model of its Transformers backend."""

UNQUANTISED = ("auto", "float32", "bfloat16", "float16")


def parse(additional_config: Any) -> CacheConfig | None:
    """Read the settings; ``None`` without settings, which leaves vLLM unchanged."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    values = additional_config[KEY]
    named = values
    if isinstance(values, str):
        with refusing("h2okv", f"give for example {EXAMPLE}", ValueError):
            named, config = cache_spec.parse(values), CacheConfig.from_spec(values)
    elif isinstance(values, Mapping):
        config = CacheConfig.from_dict(values)
    else:
        raise ValueError(f"{KEY}={values!r} is not a cache; give for example {EXAMPLE}.")
    if config.budget.is_relative and not config.is_full:
        raise ValueError(
            f"h2okv: a budget of {config.budget_label} is a fraction of a text, but vLLM gives"
            " every request a block of one size before it knows any prompt; give a number of"
            f" tokens: {EXAMPLE}."
        )
    if config.whole_prompts and "evict_every" in named:
        raise ValueError(
            f"h2okv: every={config.cuts}: inside vLLM spans are counted from the text's first"
            f" token; give every={config.span}."
        )
    config = config.cut_every(None) if config.whole_prompts else config
    _check_cache(config)
    return config


def rule_of(config: CacheConfig) -> Rule:
    """Return a config's eviction rule."""
    return get_rule(config.policy, config.seed, config.scoring, config.decay)


def _check_cache(config: CacheConfig) -> None:
    rule = rule_of(config)
    cuts: Any = config.evict_every
    check_rule(rule, PositionRule(config.positions, cuts))
    if not rule.is_bounded:
        raise ValueError(
            f"h2okv: policy={config.policy!r} keeps more with every token, and a request's block "
            "has one size; use policy='h2o', or leave the h2okv setting out for a full cache."
        )
    if config.positions != "original":
        text = "needs keys that vLLM has not rotated; use positions='original'."
        raise ValueError(f"h2okv: positions={config.positions!r} {text}")
    if rule.inputs is Inputs.KEYS and config.span == 1:
        raise ValueError(
            f"h2okv: policy={config.policy!r} ranks by keys, which inside vLLM are at hand only "
            "where a span ends; give every=64, or use policy='h2o'."
        )
    if config.kv_bits is not None:
        raise ValueError(
            f"h2okv: kv_bits={config.kv_bits}: inside vLLM a step reads keys and values where they "
            "lie, which the operations on packed ones cannot; leave it out."
        )


def check_engine(vllm_config: Any, cache: CacheConfig) -> None:
    """Refuse configurations that are not exact or not tested."""
    model, length = vllm_config.model_config, vllm_config.model_config.max_model_len
    total = cache.budget.resolve(0).total
    if model.architecture not in FAMILIES:
        raise ValueError(
            f"h2okv: the architecture {model.architecture} is not among those that H2O has been "
            f"run with in vLLM ({', '.join(FAMILIES)}); leave the h2okv setting out, or try "
            "--model-impl transformers if all its layers are full attention."
        )
    if total > length:
        raise ValueError(
            f"h2okv: sink + heavy + recent = {total} entries are above max_model_len={length}, so "
            "nothing would be evicted; lower the budget, or leave the h2okv setting out."
        )
    for problem in _problems(vllm_config):
        raise ValueError(f"h2okv: {problem}.")
    if cache.layer_budgets is not None:
        text = model.hf_text_config
        check_layer_budgets(cache, rule_of(cache), text, text.num_hidden_layers)
    if cache.scoring == "expected" and model.using_transformers_backend():
        raise ValueError(
            "h2okv: scoring='expected' (policy='best' has it too) needs to know how keys are "
            "rotated, and vLLM's Transformers backend does not say; use another scoring."
        )
    every, step_tokens = cache.evict_every, vllm_config.scheduler_config.max_num_batched_tokens
    if every is not None and every > step_tokens:
        raise ValueError(
            f"h2okv: evict_every={every} is above max_num_batched_tokens={step_tokens}, so no "
            "step could read as many; lower evict_every, or raise --max-num-batched-tokens."
        )


def _problems(vllm_config: Any) -> Iterator[str]:
    """Yield the problems of an engine's configuration with H2O."""
    model, cache, parallel = (
        getattr(vllm_config, f"{name}_config") for name in ("model", "cache", "parallel")
    )
    text = model.hf_text_config
    if vllm_config.speculative_config is not None:
        yield (
            "speculative decoding removes tokens, but not the evictions that they caused; leave "
            "--speculative-config out"
        )
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors move pages of a full cache; leave --kv-transfer-config out"
    for kind in ("data", "pipeline", "decode_context", "prefill_context"):
        name = f"{kind}_parallel_size"
        if (value := getattr(parallel, name, 1)) > 1:
            yield (
                f"{name}={value} has not been tried; use --tensor-parallel-size, or several servers"
            )
    if getattr(parallel, "use_ubatching", False):
        yield "splitting a step (--enable-dbo, --ubatch-size) has not been tried; leave it out"
    if cache.cache_dtype not in UNQUANTISED:
        yield f"kv_cache_dtype={cache.cache_dtype} is not supported; use --kv-cache-dtype auto"
    if getattr(cache, "kv_offloading_size", None):
        yield "KV offloading moves pages of a full cache; leave --kv-offloading-size out"
    if model.runner_type != "generate":
        yield f"runner={model.runner_type!r} generates no text; leave the h2okv setting out"
    if getattr(model, "multimodal_config", None) is not None:
        yield f"{model.architecture} reads more than text, which has not been tried; serve it alone"
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        yield (
            f"{model.architecture} has layers that are not full attention "
            f"({', '.join(sorted(kinds))}), which vLLM would have to keep in pages besides the "
            "states; leave the h2okv setting out"
        )
    if cache.sliding_window:
        yield (
            f"{model.architecture} has a sliding window of {cache.sliding_window} tokens in every "
            "layer, so there is nothing to evict; leave the h2okv setting out"
        )
    yield from _scheduler_problems(vllm_config.scheduler_config)
    if getattr(vllm_config, "use_v2_model_runner", False):
        yield "the V2 model runner has not been tried; set VLLM_USE_V2_MODEL_RUNNER=0"


def _scheduler_problems(scheduler: Any) -> Iterator[str]:
    if scheduler.scheduler_cls is not None:
        yield (
            f"scheduler_cls={scheduler.scheduler_cls!r} would replace the scheduler that splits "
            "prompts; leave --scheduler-cls out"
        )
    if threshold := scheduler.long_prefill_token_threshold:
        yield (
            f"long_prefill_token_threshold={threshold} splits prompts depending on other requests; "
            "use evict_every in the h2okv setting instead"
        )


def with_cuts(cache: CacheConfig, vllm_config: Any) -> CacheConfig:
    """Return the config, with cuts that fit a step if a prompt may not fit."""
    scheduler = vllm_config.scheduler_config
    step_tokens = scheduler.max_num_batched_tokens
    if cache.evict_every is not None or vllm_config.model_config.max_model_len <= step_tokens:
        return cache
    # Leave room for a token of every other request.
    return cache.with_cuts(max(1, min(SPAN, step_tokens - scheduler.max_num_seqs)))


def caches_prefixes(cache: CacheConfig, is_wanted: bool) -> bool:
    """Tell whether requests may go on from states of others.

    Only with ``evict_every`` a state depends on the text alone, and not on how it was read.
    """
    return is_wanted and cache.evict_every is not None and cache.evict_every > 1


def tokens_to_run(start: int, available: int, prompt_length: int, cache: CacheConfig) -> int:
    """Return how many tokens of a request a step runs: a whole chunk of its prompt, or none.

    With ``evict_every`` any cut gives the same states, and those at its multiples can be cached.
    """
    if cache.evict_every is not None:
        return min(available, cache.evict_every - start % cache.evict_every)
    if start >= prompt_length:  # also of a preempted request that reads its output again
        return min(available, 1)
    return prompt_length - start if available >= prompt_length - start else 0


def summary(
    cache: CacheConfig,
    request_bytes: int,
    num_requests: int,
    max_num_seqs: int,
    is_caching: bool = False,
) -> str:
    """Return the line for the log."""
    chunk = "whole" if cache.evict_every is None else f"in chunks of {cache.evict_every}"
    entries = "for each layer and KV head"
    if cache.layer_budgets is not None:
        entries = f"in the mean, divided among the {'KV heads' if cache.is_by_head else 'layers'}"
    prefixes = f"cached every {cache.evict_every} tokens" if is_caching else "not cached"
    return (
        f"h2okv: {cache.label}: {cache.budget.resolve(0).total} entries {entries} "
        f"(sink {cache.sink}, heavy {cache.heavy}, recent {cache.recent}), prompts read {chunk}; "
        f"{request_bytes:,} bytes a request on each rank, room for {num_requests:,} requests at "
        f"once (max_num_seqs={max_num_seqs}); prefixes are {prefixes}"
    )
