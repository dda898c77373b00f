"""The caches under test, all driven in the same way: read a prompt, then token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import h2okv
from h2okv.benchmarking.settings import CacheChoice
from h2okv.integration.hf import ATTENTION_NAME


class Contestant(ABC):
    """One cache on a model.

    Args:
        model: The model; `prepare` sets its attention implementation.
        choice: Which cache, and its budget.
        prefill_chunk: Tokens of a block of the prompt; ``None`` reads it at once.
        compiled: Whether steps on slots that do not grow run through ``torch.compile``.
    """

    attention = "sdpa"
    reads_prompt = True
    """Whether the time of the prompt means something."""

    def __init__(
        self,
        model: PreTrainedModel,
        choice: CacheChoice,
        prefill_chunk: int | None = None,
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.choice = choice
        self.prefill_chunk = prefill_chunk
        self.compiled = compiled
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

    def read(self, ids: torch.Tensor) -> None:
        """Reads a prompt, int64 ``[B, T]``; what is timed as prefill."""
        for block in ids.split(self.prefill_chunk or ids.shape[1], dim=1):
            self.logits = self.forward(block)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Gets the model ready for decode steps inside a ``with`` block; not timed."""
        self.model.set_attn_implementation(self.attention)
        yield

    def step(self, token: torch.Tensor) -> None:
        """Reads one token of each sequence, int64 ``[B, 1]``; what is timed as decode."""
        self.logits = self.forward(token)

    def forward(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Runs the model as `generate` does; logits ``[B, 1, V]`` of the last token."""
        with torch.no_grad():
            output = self.model(
                ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **options
            )
        return output.logits

    def forget(self) -> None:
        """Lets go of cache and logits."""
        self.cache = self.logits = None

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds now."""
        return held_bytes(self.cache)


class Dynamic(Contestant):
    """transformers' `DynamicCache`: everything, appended token by token."""

    def new_cache(self, context: int) -> Any:
        """See `Contestant`."""
        return DynamicCache(config=self.model.config)


class Static(Contestant):
    """transformers' `StaticCache` with as many entries as H2O holds, kept full.

    It cannot evict: it reads the end of the prompt, as much as it holds, and every step overwrites
    its last entry. Only its step is comparable.
    """

    reads_prompt = False

    def new_cache(self, context: int) -> Any:
        """See `Contestant`; one entry more than K, as H2O has one free slot."""
        self.entries = self.choice.entries(context) + 1
        return StaticCache(config=self.model.config, max_cache_len=self.entries)

    def read(self, ids: torch.Tensor) -> None:
        """Fills all entries but one."""
        super().read(ids[:, -(self.entries - 1) :])

    def step(self, token: torch.Tensor) -> None:
        """See `Contestant`."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.entries - 1)
        super().step(token)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `Contestant`; compiled as `generate` compiles it."""
        with super().stepping(), _compiled_forward(self.model) if self.compiled else nullcontext():
            yield


class H2O(Contestant):
    """`h2okv.H2OCache`."""

    attention = ATTENTION_NAME

    def new_cache(self, context: int) -> Any:
        """See `Contestant`."""
        cache = h2okv.H2OCache(
            self.model.config,
            **self.choice.parts(),
            positions=self.choice.positions,
            prefill_chunk=self.prefill_chunk,
            kv_bits=self.choice.kv_bits,
        )
        cache.expect(context)
        return cache

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `Contestant`; compiled as `h2okv.enable` compiles it."""
        with super().stepping(), self._enabled() if self.compiled else nullcontext():
            yield

    def _enabled(self) -> AbstractContextManager[Any]:
        return h2okv.enable(self.model, compile=True)

    @property
    def nbytes(self) -> int:
        """See `Contestant`; scores and positions included."""
        return int(self.cache.nbytes)


@contextmanager
def _compiled_forward(model: PreTrainedModel) -> Iterator[None]:
    """Compiles a model's forward inside a ``with`` block, with CUDA graphs on a GPU."""
    on_gpu = model.device.type == "cuda"
    own_forward = vars(model).get("forward")
    vars(model)["forward"] = torch.compile(
        model.forward, fullgraph=True, mode="reduce-overhead" if on_gpu else "default"
    )
    try:
        yield
    finally:
        del vars(model)["forward"]
        if own_forward is not None:
            vars(model)["forward"] = own_forward


def static_shapes() -> AbstractContextManager[Any]:
    """Compiles every new size for itself, as the first one in a process is, not for any size."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


def held_bytes(cache: Any) -> int:
    """Counts the bytes of keys and values in a cache of transformers, packed ones too."""
    total = 0
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if name.lstrip("_") in ("keys", "values", "quantized_keys", "quantized_values"):
                total += _nbytes(value)
    return total


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, also of one made of others, or of tensors in tuples and dicts."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(_nbytes, value))
    return 0


def one_line(error: BaseException) -> str:
    """Says what happened, on one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
