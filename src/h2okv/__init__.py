"""H2O: heavy-hitter KV-cache eviction for Hugging Face models (arXiv 2306.14048)."""

from h2okv.cache import H2OCache
from h2okv.cache.validation import check_model
from h2okv.config import Budget, CacheConfig
from h2okv.engine import LLM, AsyncLLM, SamplingParams
from h2okv.integration import enable, prefill, recipe_path, register
from h2okv.ops.dispatch import use as use_ops
from h2okv.policy import Policy, policy_names, register_policy

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Budget",
    "CacheConfig",
    "H2OCache",
    "Policy",
    "SamplingParams",
    "check_model",
    "enable",
    "policy_names",
    "prefill",
    "recipe_path",
    "register_policy",
    "use_ops",
]

register()
