"""Exact H2O inside vLLM: a state of constant size for each request (docs/vllm.md).

vLLM calls `register` when it starts, in each of its processes. Nothing of vLLM is replaced: if
``additional_config`` has the key h2okv, the model's configuration is changed before the engine
starts.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from typing import Any

from h2okv.config import CacheConfig
from h2okv.vllm_plugin.measure import measured
from h2okv.vllm_plugin.settings import (
    FAMILIES,
    KEY,
    caches_prefixes,
    check_engine,
    parse,
    with_cuts,
)

__all__ = ["register"]

_logger = logging.getLogger("vllm.h2okv")  # a child of vLLM's logger, so it is shown
TESTED = "0.32.0"
OPERATION = "vllm::h2o_attention"
NAMES = (
    "vllm.model_executor.models.config:MODELS_CONFIG_MAP",
    "vllm.model_executor.models.config:VerifyAndUpdateConfig",
    "vllm.model_executor.models:ModelRegistry.register_model",
    "vllm.model_executor.layers.mamba.abstract:MambaBase.bind_kv_cache",
    "vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec",
    "vllm.v1.kv_cache_interface:MambaSpec.max_num_blocks_per_req",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
    "vllm.v1.attention.backend:AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE",
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.utils.torch_utils:direct_register_custom_op",
    "vllm.config:CompilationConfig._attention_ops",
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
)
"""Names of vLLM that the plug-in needs."""


def missing_names() -> list[str]:
    """Return the names of `NAMES` that this vLLM lacks."""
    missing = []
    for name in NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name.replace(":", "."))
    return missing


def register() -> None:
    """Install the hook for every engine's configuration; the entry point of vLLM's plug-ins."""
    try:
        from vllm.model_executor.models import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    except ImportError as error:
        _logger.warning("h2okv is not active in this vLLM: %s", error)
        return
    for name in ModelRegistry.get_supported_archs():
        config_class = MODELS_CONFIG_MAP.get(name, VerifyAndUpdateConfig)
        if not hasattr(config_class, "h2okv"):  # register may be called more than once
            MODELS_CONFIG_MAP[name] = _with_h2o(config_class)
    for name in FAMILIES:
        ModelRegistry.register_model(f"H2O{name}", f"h2okv.vllm_plugin.layer:H2O{name}")


def _with_h2o(base: Any) -> Any:
    """Return an architecture's configuration class, extended by H2O's changes."""

    def verify_and_update_config(cls: type, vllm_config: Any) -> None:
        base.verify_and_update_config(vllm_config)
        cache = parse(vllm_config.additional_config)
        if cache is not None:
            prepare(vllm_config, cache)

    hook: Any = classmethod(verify_and_update_config)
    return type(base.__name__, (base,), {"verify_and_update_config": hook, "h2okv": True})


def prepare(vllm_config: Any, cache: CacheConfig) -> None:
    """Turn an engine's configuration into one with H2O; mutates it."""
    version = importlib.import_module("vllm").__version__
    missing = missing_names()
    if missing:
        raise ValueError(
            f"h2okv: vLLM {version} has no {' and no '.join(missing)}; h2okv was tested with vLLM "
            f"{TESTED}, install that one or a newer h2okv."
        )
    if version != TESTED:
        _logger.warning("h2okv was tested with vLLM %s, and this is %s", TESTED, version)
    check_engine(vllm_config, cache.before_measuring)
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    cache = with_cuts(measured(cache, model), vllm_config)
    check_engine(vllm_config, cache)
    vllm_config.additional_config = {**vllm_config.additional_config, KEY: cache.to_dict()}
    # A name, because each process must find the class. The original name stays in the list: the
    # engine and the mapping of checkpoint names need it.
    model.hf_config.architectures = [f"H2O{model.architecture}", *model.hf_config.architectures]
    model.model_impl = "vllm"
    compilation = vllm_config.compilation_config
    operations = compilation.splitting_ops or compilation._attention_ops
    compilation.splitting_ops = [*operations, OPERATION]
    scheduler.scheduler_cls = "h2okv.vllm_plugin.scheduler.H2OScheduler"
    pages = vllm_config.cache_config
    pages.enable_prefix_caching = caches_prefixes(cache, pages.enable_prefix_caching)
    pages.mamba_cache_mode = "none"  # `StateSpec` says why
    pages.mamba_block_size = model.max_model_len
    if pages.enable_prefix_caching:
        pages.mamba_block_size = pages.block_size = cache.evict_every
        pages.user_specified_block_size = True
        # 0, vLLM's default, caches a prompt's last multiple; None, all of them, so that any two
        # texts with the same beginning find it.
        pages.prefix_cache_retention_interval = pages.prefix_cache_retention_interval or None
