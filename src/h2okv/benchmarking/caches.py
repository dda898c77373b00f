"""The caches that are compared: H2O, and transformers' own and kvpress as baselines."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_hqq_available, is_optimum_quanto_available

import h2okv
from h2okv.config import CacheConfig
from h2okv.integration.attention import ATTENTION_NAME

_NOT_INSTALLED = "not installed"
_QUANTIZED_BITS = 4


def cache_label(name: str, budget: int | float | None, kv_bits: int | None = None) -> str:
    """What tables and figures call a cache: ``h2o 20%, 8 bits``."""
    if budget is None:
        return name
    amount = f"{100 * budget:g}%" if isinstance(budget, float) else str(budget)
    return f"{name} {amount}" + ("" if kv_bits is None else f", {kv_bits} bits")


@dataclass(frozen=True)
class CacheSpec:
    """One cache to measure: the name of a runner and, for those with a budget, what H2O keeps."""

    name: str
    config: CacheConfig | None = None

    @classmethod
    def of(cls, name: str, budget: int | float | None = None, **options: Any) -> CacheSpec:
        """Divides a budget in halves, heavy hitters and recent tokens; ``None`` holds everything.

        Not `CacheConfig.from_budget`: a budget of 1.0 is measured with its slots, too.
        """
        if budget is None:
            return cls(name)
        heavy = budget / 2 if isinstance(budget, float) else budget // 2
        return cls(name, CacheConfig(heavy=heavy, recent=budget - heavy, **options))

    @property
    def budget(self) -> int | float | None:
        """Tokens or a fraction of the prompt; ``None`` if everything is held."""
        return None if self.config is None else self.config.heavy + self.config.recent

    @property
    def kv_bits(self) -> int | None:
        """Bits of a number of H2O's keys and values; ``None`` for the model's dtype."""
        return None if self.config is None else self.config.kv_bits

    @property
    def label(self) -> str:
        """See `cache_label`."""
        return cache_label(self.name, self.budget, self.kv_bits)

    def entries(self, context: int) -> int:
        """Entries that one KV head holds after a prompt of so many tokens: K, or all."""
        return context if self.config is None else self.config.entries(context)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CacheSpec:
        """Makes the spec that `dataclasses.asdict` described."""
        config = values["config"]
        return cls(values["name"], config and CacheConfig.from_dict(config))

    def runner(
        self, model: PreTrainedModel, prefill_chunk: int | None = None, compiled: bool = False
    ) -> CacheRunner:
        """Makes the runner of this cache on a model."""
        return RUNNERS[self.name](model, self, prefill_chunk, compiled)


class CacheRunner(ABC):
    """One cache on a model: reads a prompt, then takes decode steps."""

    attention = "sdpa"
    has_budget = False
    can_compile = False
    """Whether shapes stay as they are, so that a step can be compiled once."""
    reads_prompt = True
    """Whether the time of the prompt means something."""

    def __init__(
        self, model: PreTrainedModel, spec: CacheSpec, prefill_chunk: int | None, compiled: bool
    ) -> None:
        self.model, self.spec = model, spec
        self.prefill_chunk, self.compiled = prefill_chunk, compiled
        self.cache: Any = None
        self.logits: torch.Tensor | None = None

    @classmethod
    def obstacle(cls) -> str | None:
        """Why it cannot run here; ``None`` if it can."""
        return None

    @abstractmethod
    def new_cache(self, context: int) -> Any:
        """Makes an empty cache for a prompt of so many tokens."""

    def prepare(self, context: int) -> None:
        """Gets ready for a prompt; not timed."""
        self.cache = None
        self.cache = self.new_cache(context)
        self.model.set_attn_implementation(self.attention)

    def prefill(self, ids: torch.Tensor) -> None:
        """Reads a prompt, int64 ``[B, T]``; timed."""
        for block in ids.split(self.prefill_chunk or ids.shape[1], dim=1):
            self.logits = self.forward(block)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Gets the model ready for decode steps inside a ``with`` block; not timed."""
        self.model.set_attn_implementation(self.attention)
        with self.compiled_steps() if self.compiled else nullcontext():
            yield

    def compiled_steps(self) -> AbstractContextManager[Any]:
        """Compiles the steps inside a ``with`` block, where `can_compile`."""
        return nullcontext()

    def step(self, token: torch.Tensor) -> None:
        """Reads one token of each sequence, int64 ``[B, 1]``; timed."""
        self.logits = self.forward(token)

    def forward(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Runs the model as `generate` does; logits ``[B, 1, V]`` of the last token."""
        with torch.no_grad():
            return self.model(
                ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **options
            ).logits

    def release(self) -> None:
        """Lets go of cache and logits."""
        self.cache = self.logits = None

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds now."""
        return held_bytes(self.cache)


class DynamicRunner(CacheRunner):
    """transformers' `DynamicCache`: everything, appended token by token."""

    def new_cache(self, context: int) -> Any:
        """See `CacheRunner`."""
        return DynamicCache(config=self.model.config)


class StaticRunner(CacheRunner):
    """transformers' `StaticCache` with as many entries as H2O holds, kept full.

    It cannot evict: it reads the end of the prompt, as much as it holds, and every step overwrites
    its last entry. Only its step is comparable.
    """

    has_budget = can_compile = True
    reads_prompt = False

    def new_cache(self, context: int) -> Any:
        """See `CacheRunner`; one entry more than K, as H2O has one free slot."""
        self.entries = self.spec.entries(context) + 1
        return StaticCache(config=self.model.config, max_cache_len=self.entries)

    def prefill(self, ids: torch.Tensor) -> None:
        """Fills all entries but one."""
        super().prefill(ids[:, -(self.entries - 1) :])

    def step(self, token: torch.Tensor) -> None:
        """See `CacheRunner`."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.entries - 1)
        super().step(token)

    @contextmanager
    def compiled_steps(self) -> Iterator[None]:
        """Compiles the forward as `generate` does, with CUDA graphs on a GPU."""
        model = self.model
        mode = "reduce-overhead" if model.device.type == "cuda" else "default"
        own_forward = vars(model).get("forward")
        vars(model)["forward"] = torch.compile(model.forward, fullgraph=True, mode=mode)
        try:
            yield
        finally:
            del vars(model)["forward"]
            if own_forward is not None:
                vars(model)["forward"] = own_forward


class H2ORunner(CacheRunner):
    """`h2okv.H2OCache`."""

    attention = ATTENTION_NAME
    has_budget = can_compile = True

    def new_cache(self, context: int) -> Any:
        """See `CacheRunner`."""
        assert self.spec.config is not None
        config = replace(self.spec.config, prefill_chunk=self.prefill_chunk)
        cache = h2okv.H2OCache.from_config(self.model.config, config)
        cache.expect(context)
        return cache

    def compiled_steps(self) -> AbstractContextManager[Any]:
        """See `CacheRunner`."""
        return h2okv.enable(self.model, compile=True)

    @property
    def nbytes(self) -> int:
        """See `CacheRunner`; scores and positions included."""
        return int(self.cache.nbytes)


class QuantizedRunner(CacheRunner):
    """transformers' `QuantizedCache` with 4 bits, by quanto or HQQ."""

    @classmethod
    def obstacle(cls) -> str | None:
        """See `CacheRunner`."""
        if is_optimum_quanto_available() or is_hqq_available():
            return None
        return f"{_NOT_INSTALLED} (optimum-quanto or hqq)"

    def new_cache(self, context: int) -> Any:
        """See `CacheRunner`."""
        backend = "quanto" if is_optimum_quanto_available() else "hqq"
        # HQQ counts axes from the front only.
        return QuantizedCache(backend, self.model.config, nbits=_QUANTIZED_BITS)


class KvpressRunner(CacheRunner):
    """kvpress's `ObservedAttentionPress`, which is H2O's score on the prompt alone.

    It needs eager attention, and so the T x T matrix, for the prompt; steps run on a `DynamicCache`
    of what was kept, which grows.
    """

    attention = "eager"
    has_budget = True

    @classmethod
    def obstacle(cls) -> str | None:
        """See `CacheRunner`."""
        try:
            _import_kvpress()
        except ModuleNotFoundError as error:
            if error.name == "kvpress":
                return _NOT_INSTALLED
            return f"installed, but needs the module {error.name}"
        except Exception as error:  # whatever another package's import may raise
            return f"installed, but fails: {one_line(error)}"
        return None

    def new_cache(self, context: int) -> Any:
        """See `CacheRunner`."""
        self.seen = 0
        self.kept_fraction = self.spec.entries(context) / context
        return DynamicCache(config=self.model.config)

    def prefill(self, ids: torch.Tensor) -> None:
        """Reads the prompt at once; blocks would be scored one by one."""
        press_class = _import_kvpress().ObservedAttentionPress
        with press_class(compression_ratio=1 - self.kept_fraction)(self.model):
            # kvpress 0.5 asks the attention's arguments for it; transformers made it up to 5.2.
            places = torch.arange(ids.shape[1], device=ids.device)
            self.logits = self.forward(ids, cache_position=places)
        self.seen = ids.shape[1]

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `CacheRunner`; steps need no matrix, and run on SDPA."""
        self.model.set_attn_implementation("sdpa")
        yield

    def step(self, token: torch.Tensor) -> None:
        """See `CacheRunner`; the cache does not know how many tokens there were before."""
        self.logits = self.forward(token, position_ids=torch.full_like(token, self.seen))
        self.seen += 1


def _import_kvpress() -> Any:
    """Imports kvpress, and leaves every registered attention function as it was.

    Its import wraps them all for masks of its own, which this press does not use; the other caches
    would pay for that, and H2O's attention does not take arguments in that order.
    """
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    package = importlib.import_module("kvpress")
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    return package


RUNNERS: dict[str, type[CacheRunner]] = {
    "dynamic": DynamicRunner,
    "static": StaticRunner,
    "quantized": QuantizedRunner,
    "h2o": H2ORunner,
    "kvpress": KvpressRunner,
}
"""Every cache that can be measured, by name."""


def held_bytes(cache: Any) -> int:
    """Counts the bytes of keys and values in a cache of transformers, packed ones too."""
    stored = ("keys", "values", "quantized_keys", "quantized_values")
    return sum(
        _nbytes(value)
        for layer in cache.layers
        for name, value in vars(layer).items()
        if name.lstrip("_") in stored
    )


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, also of one made of others, or of tensors in tuples and dicts."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, tuple | list) else 0


def one_line(error: BaseException) -> str:
    """Says what happened, on one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
