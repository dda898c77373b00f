"""H2O: heavy-hitter KV-cache eviction for Hugging Face models (arXiv 2306.14048)."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2okv.cache import H2OCache
    from h2okv.cache.validation import check_model
    from h2okv.config import Budget, CacheConfig
    from h2okv.engine import LLM, AsyncLLM, SamplingParams
    from h2okv.integration import enable, measure_layer_budgets, prefill, recipe_path
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
    "measure_layer_budgets",
    "policy_names",
    "prefill",
    "recipe_path",
    "register_policy",
    "use_ops",
]

_PLACES = {
    "LLM": "engine:LLM",
    "AsyncLLM": "engine:AsyncLLM",
    "Budget": "config:Budget",
    "CacheConfig": "config:CacheConfig",
    "H2OCache": "cache:H2OCache",
    "Policy": "policy:Policy",
    "SamplingParams": "engine:SamplingParams",
    "check_model": "cache.validation:check_model",
    "enable": "integration:enable",
    "measure_layer_budgets": "integration:measure_layer_budgets",
    "policy_names": "policy:policy_names",
    "prefill": "integration:prefill",
    "recipe_path": "integration:recipe_path",
    "register_policy": "policy:register_policy",
    "use_ops": "ops.dispatch:use",
}
"""Where each name is. It is imported when it is first asked for: torch and transformers take
seconds, and neither `h2okv --help` nor a Budget needs them."""

_MODELS = "transformers.modeling_utils"


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'h2okv' has no attribute {name!r}")
    place, attribute = _PLACES[name].split(":")
    value = getattr(importlib.import_module(f"h2okv.{place}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _RegisterWithTransformers:
    """Registers the attention "h2o" as soon as transformers can load models.

    `import h2okv` alone makes ``from_pretrained(..., attn_implementation="h2o")`` work, and does
    not import transformers for that.
    """

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(models: ModuleType) -> None:
    """Registers functions that bring the real ones, which replace them.

    What they import may itself still be in the middle of its own import now.
    """
    from transformers.masking_utils import AttentionMaskInterface

    models.AttentionInterface.register("h2o", _bring("h2o_attention"))
    AttentionMaskInterface.register("h2o", _bring("h2o_mask"))


def _bring(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        from h2okv.integration import attention

        return getattr(attention, name)(*args, **options)

    return call


if _MODELS in sys.modules:
    _register(sys.modules[_MODELS])
else:
    sys.meta_path.insert(0, _RegisterWithTransformers())
