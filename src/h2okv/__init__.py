"""H2O: heavy-hitter KV-cache eviction for Hugging Face models (arXiv 2306.14048)."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from h2okv.measures import register_measure

if TYPE_CHECKING:  # the names of `_MODULES`; "as" tells type checkers that they are public
    from h2okv.assets import sample_article as sample_article
    from h2okv.budget import Budget as Budget
    from h2okv.cache import H2OCache as H2OCache
    from h2okv.cache.support import check_model as check_model
    from h2okv.calibration.factors import measure_layer_budgets as measure_layer_budgets
    from h2okv.config import CacheConfig as CacheConfig
    from h2okv.engine.config import EngineConfig as EngineConfig
    from h2okv.engine.llm import LLM as LLM
    from h2okv.engine.llm import AsyncLLM as AsyncLLM
    from h2okv.engine.outputs import EngineStoppedError as EngineStoppedError
    from h2okv.engine.outputs import OutputDelta as OutputDelta
    from h2okv.engine.outputs import QueueFullError as QueueFullError
    from h2okv.engine.outputs import RequestFailedError as RequestFailedError
    from h2okv.engine.outputs import RequestOutput as RequestOutput
    from h2okv.engine.sampling_params import SamplingParams as SamplingParams
    from h2okv.integration.enable import disable as disable
    from h2okv.integration.enable import enable as enable
    from h2okv.integration.enable import prefill as prefill
    from h2okv.integration.enable import recipe_path as recipe_path
    from h2okv.models.loading import load as load
    from h2okv.ops.dispatch import use as use_ops
    from h2okv.policy import Policy as Policy
    from h2okv.policy import Rule as Rule
    from h2okv.policy import policy_names as policy_names
    from h2okv.policy import register_policy as register_policy
    from h2okv.prompts.readers import PromptTooLongError as PromptTooLongError

__version__ = "0.1.0"
_MODULES: dict[str, tuple[str, ...]] = {
    "assets": ("sample_article",),
    "cache": ("H2OCache",),
    "cache.support": ("check_model",),
    "config": ("Budget", "CacheConfig"),
    "engine.config": ("EngineConfig",),
    "engine.llm": ("LLM", "AsyncLLM"),
    "engine.outputs": (
        "EngineStoppedError",
        "OutputDelta",
        "QueueFullError",
        "RequestFailedError",
        "RequestOutput",
    ),
    "engine.sampling_params": ("SamplingParams",),
    "integration.enable": ("disable", "enable", "prefill", "recipe_path"),
    "calibration.factors": ("measure_layer_budgets",),
    "prompts.readers": ("PromptTooLongError",),
    "models.loading": ("load",),
    "ops.dispatch": ("use_ops",),
    "policy": ("Policy", "Rule", "policy_names", "register_policy"),
}
"""The module of each name, imported on first use: torch and transformers take seconds, and neither
`h2okv --help` nor a Budget needs them."""
__all__ = ["use_ops"]  # which has another name in its module
__all__ += [name for names in _MODULES.values() for name in names if name != "use_ops"]

_MODELING_UTILS = "transformers.modeling_utils"


def __getattr__(name: str) -> Any:
    for module_name, names in _MODULES.items():
        if name in names:
            module = importlib.import_module(f"h2okv.{module_name}")
            value = getattr(module, "use" if name == "use_ops" else name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'h2okv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _RegisterWithTransformers:
    """Registers the attention "h2o" when transformers is imported, without importing it."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODELING_UTILS:
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
    """Register functions that import the real ones, which replace them.

    Their module cannot be imported here: it may be in the middle of its import.
    """
    from transformers.masking_utils import AttentionMaskInterface

    attention = partial(_call, "integration.attention")
    models.AttentionInterface.register("h2o", partial(attention, "h2o_attention"))
    AttentionMaskInterface.register("h2o", partial(attention, "h2o_mask"))


def _call(module: str, name: str, *args: Any, **options: Any) -> Any:
    """Call a function of a module that is imported only now."""
    return getattr(importlib.import_module(f"h2okv.{module}"), name)(*args, **options)


register_measure("budgets", partial(_call, "calibration.layer_budgets", "budgets_of_model"))
register_measure("keys", partial(_call, "calibration.key_transforms", "transforms_of_model"))
if _MODELING_UTILS in sys.modules:
    _register(sys.modules[_MODELING_UTILS])
else:
    sys.meta_path.insert(0, _RegisterWithTransformers())
