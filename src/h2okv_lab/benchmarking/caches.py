"""The caches that are compared, H2O and those of transformers, and the memory of each.

Peak memory is measured in a separate process: `python -P -m h2okv_lab.benchmarking.caches`.
"""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import is_hqq_available, is_optimum_quanto_available
from transformers.utils import logging as transformers_logging

import h2okv
from h2okv.cache import CACHE
from h2okv.config import CacheConfig
from h2okv.engine.memory import peak_resident_bytes, reset_peak, resident_bytes
from h2okv.integration.attention import ATTENTION_NAME
from h2okv.integration.enable import input_device
from h2okv.offload.profile import Clock
from h2okv_lab.benchmarking.model import Footprint, ModelSource

_CHILD = "h2okv_lab.benchmarking.caches"
SDPA_KERNELS = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


@dataclass(frozen=True)
class CacheSpec:
    """One cache to measure: the name of a runner and, if it has a budget, H2O's config."""

    name: str
    config: CacheConfig | None = None

    @property
    def budget(self) -> int | float | str | None:
        """Tokens or a fraction of the prompt, split if unequal; ``None`` for a full cache."""
        if self.config is None:
            return None
        sink, heavy, recent = self.config.sink, self.config.heavy, self.config.recent
        is_halved = type(heavy) is type(recent) and abs(heavy - recent) <= isinstance(heavy, int)
        if is_halved and not sink:
            return heavy + recent
        amounts = (sink, heavy, recent) if sink else (heavy, recent)
        return "+".join(f"{100 * p:g}%" if isinstance(p, float) else str(p) for p in amounts)

    @property
    def kv_bits(self) -> int | None:
        """Bits of a number of H2O's keys and values; ``None`` for the model's dtype."""
        return None if self.config is None else self.config.kv_bits

    @property
    def label(self) -> str:
        """Its name in tables and figures: ``h2o:20%,bits=8``, which --cache reads."""
        if self.config is None or self.name == "h2o":
            return self.name if self.config is None else self.config.label
        return f"{self.name} {self.config.budget_label}"

    def entries(self, context: int) -> int:
        """Return the entries of one KV head after a prompt of ``context`` tokens: K, or all."""
        return context if self.config is None else self.config.entries(context)

    def nbytes(self, footprint: Footprint, batch: int, context: int, free: int = 1) -> int:
        """Return the bytes after a prompt, with a free slot; an upper bound if packed."""
        entries = self.entries(context)
        if self.name == "h2o":
            return footprint.h2o_bytes(batch, entries + free, context, self.kv_bits)
        return footprint.full_bytes(batch, entries + free if self.name == "static" else entries)

    def runner(
        self, model: PreTrainedModel, block: int | None = None, compiled: bool = False
    ) -> CacheRunner:
        return RUNNERS[self.name](model, self, block, compiled)


@dataclass(eq=False)
class CacheRunner:
    """One cache on a model: a prompt, then decode steps. The base class is `DynamicCache`."""

    model: PreTrainedModel
    spec: CacheSpec
    block: int | None
    compiled: bool
    cache: Any = None
    logits: torch.Tensor | None = None
    fastest: Any = None  # a step with the kernel of SDPA that the runner chose, and its name
    kernel: str = ""

    attention: ClassVar = "sdpa"
    has_budget: ClassVar = False
    can_compile: ClassVar = False  # whether shapes are constant: a step is compiled once
    reads_prompt: ClassVar = True  # whether the time of the prompt is comparable

    @classmethod
    def obstacle(cls) -> str | None:
        """Return why it cannot run here; ``None`` if it can."""
        return None

    def new_cache(self, context: int) -> Any:
        """Make an empty cache for a prompt of ``context`` tokens."""
        return DynamicCache(config=self.model.config)

    def prepare(self, context: int) -> None:
        """Prepare for a prompt; not timed."""
        self.cache = self.fastest = None
        self.cache = self.new_cache(context)
        self.model.set_attn_implementation(self.attention)

    def prefill(self, ids: torch.Tensor) -> None:
        """Read a prompt, int64 ``[B, T]``; timed."""
        for block in ids.split(self.block or ids.shape[1], dim=1):
            self.logits = self.forward(block)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Prepare the model for decode steps inside a ``with`` block; not timed."""
        self.model.set_attn_implementation(self.attention)
        with self.compiled_steps() if self.compiled else nullcontext():
            yield

    def compiled_steps(self) -> AbstractContextManager[Any]:
        """Compile the steps inside a ``with`` block, if `can_compile`."""
        return nullcontext()

    def step(self, token: torch.Tensor) -> None:
        """Read one token of each sequence, int64 ``[B, 1]``; timed."""
        self.logits = self.forward(token)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the model as `generate` does; return the last token's logits ``[B, 1, V]``."""
        options = {CACHE: self.cache, "use_cache": True, "logits_to_keep": 1}
        with torch.no_grad():
            return self.model(ids, **options).logits

    def release(self) -> None:
        self.cache = self.logits = self.fastest = None

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.cache)


class FixedLayer(DynamicLayer):
    """A full layer whose steps overwrite its last entry; cuDNN prepares again for each length."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.keys is not None and self.values is not None
        self.keys[..., -1:, :], self.values[..., -1:, :] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return super().get_seq_length() - 1


class _Full(CacheRunner):
    """`DynamicCache`; on a GPU with steps of one length by SDPA's fastest kernel, recorded."""

    def step(self, token: torch.Tensor) -> None:
        if token.is_cuda and self.fastest is None:
            for layer in self.cache.layers:
                layer.__class__ = FixedLayer if type(layer) is DynamicLayer else type(layer)
            choices: list[Any] = [(float("inf"), "eager", self.forward)]
            for kernel in SDPA_KERNELS:
                with suppress(RuntimeError):  # it does not take these heads, or is not recorded
                    run = sdpa_kernel(kernel)(self.forward)
                    replay = torch.cuda.make_graphed_callables(run, (token.clone(),))
                    samples = Clock(token.device).samples(partial(replay, token))
                    choices.append((min(samples), kernel.name.partition("_")[0].lower(), replay))
            _, self.kernel, self.fastest = min(choices, key=lambda choice: choice[0])
        self.logits = (self.fastest or self.forward)(token)


class _Static(CacheRunner):
    """transformers' `StaticCache`, full of the prompt's end; steps overwrite its last entry."""

    has_budget = can_compile = True
    reads_prompt = False

    def new_cache(self, context: int) -> Any:
        self.entries = self.spec.entries(context) + 1  # H2O has one free slot too
        return StaticCache(config=self.model.config, max_cache_len=self.entries)

    def prefill(self, ids: torch.Tensor) -> None:
        super().prefill(ids[:, -(self.entries - 1) :])

    def step(self, token: torch.Tensor) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.entries - 1)
        super().step(token)

    def compiled_steps(self) -> AbstractContextManager[Any]:
        # As `generate` does, with CUDA graphs on a GPU.
        mode = "reduce-overhead" if input_device(self.model).type == "cuda" else "default"
        forward = torch.compile(self.model.forward, fullgraph=True, mode=mode)
        return patch.object(self.model, "forward", forward)


class _H2O(CacheRunner):
    """`h2okv.H2OCache`."""

    attention = ATTENTION_NAME
    has_budget = can_compile = True

    def new_cache(self, context: int) -> Any:
        assert self.spec.config is not None
        config = self.spec.config.with_cuts(self.block)
        cache = h2okv.H2OCache.from_config(self.model, config)
        cache.expect(context)
        return cache

    def compiled_steps(self) -> AbstractContextManager[Any]:
        return h2okv.enable(self.model, compile=True)

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes)


class _Quantized(CacheRunner):
    """transformers' `QuantizedCache` with 4 bits, by quanto or HQQ."""

    @classmethod
    def obstacle(cls) -> str | None:
        if is_optimum_quanto_available() or is_hqq_available():
            return None
        return "not installed (optimum-quanto or hqq)"

    def new_cache(self, context: int) -> Any:
        # Keep the default axes: HQQ does not support negative ones.
        backend = "quanto" if is_optimum_quanto_available() else "hqq"
        return QuantizedCache(backend, self.model.config, nbits=4)


RUNNERS: dict[str, type[CacheRunner]] = {
    "dynamic": _Full,
    "static": _Static,
    "quantized": _Quantized,
    "h2o": _H2O,
}
"""Every cache that can be measured, by name."""


def stored_bytes(cache: Any) -> int:
    """Count the bytes of keys and values in a cache of transformers, also packed ones."""
    names = ("keys", "values", "quantized_keys", "quantized_values")
    tensors = [
        v for layer in cache.layers for n, v in vars(layer).items() if n.lstrip("_") in names
    ]
    return sum(map(_nbytes, tree_leaves(tensors)))


def _nbytes(value: Any) -> int:
    """Return the bytes of a tensor or a tensor subclass."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def one_line(error: BaseException) -> str:
    """Return an error as one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class PeakRunFailedError(ValueError):
    """A run ended without a result, most likely out of memory."""

    def __init__(self, run: PeakRun, reason: str) -> None:
        less = "give a smaller context or fewer layers"
        super().__init__(f"peak memory of {run.spec.label}: {reason[:200]}; {less}")


@dataclass(frozen=True)
class PeakRun:
    """One run; picklable for another process."""

    source: ModelSource
    dtype: torch.dtype
    device: torch.device
    threads: int
    spec: CacheSpec
    context: int
    batch: int
    block: int | None = None


@dataclass(frozen=True)
class Peak:
    """Bytes before the prompt, and the run's peak."""

    loaded: int
    peak: int


def prompt_ids(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """Draw token ids, int64 ``[B, T]``, always the same, on the model's device."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (batch, length), generator=generator).to(input_device(model))


def measure_peak(run: PeakRun, model: PreTrainedModel | None = None) -> Peak | None:
    """Measure a cache's memory, on a CPU in a separate process; ``None`` if it is unknown."""
    if model is not None and input_device(model).type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(input_device(model))
        loaded = torch.cuda.memory_allocated(input_device(model))
        try:
            _run(model, run)
        except torch.OutOfMemoryError as error:
            raise PeakRunFailedError(run, one_line(error)) from error
        torch.cuda.synchronize(input_device(model))
        return Peak(loaded, torch.cuda.max_memory_allocated(input_device(model)))
    if peak_resident_bytes() is None:
        return None
    # -P: do not import from the current folder.
    command = [sys.executable, "-P", "-m", _CHILD]
    done = subprocess.run(command, input=pickle.dumps(run), capture_output=True)
    output = done.stdout.splitlines()
    if done.returncode or not output:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else "the system ended it"
        raise PeakRunFailedError(run, reason)
    return Peak(**json.loads(output[-1]))


def _run(model: PreTrainedModel, run: PeakRun) -> None:
    """Read the prompt and take two steps."""
    runner = run.spec.runner(model, run.block)
    ids = prompt_ids(model, run.batch, run.context)
    runner.prepare(run.context)
    runner.prefill(ids)
    with runner.decoding():
        for _ in range(2):
            runner.forward(ids[:, :1])  # not the choice of a kernel, which takes memory too


def _peak_in_this_process(run: PeakRun) -> Peak:
    """Build the model, run, and return this process's peak (called in the other process)."""
    torch.set_num_threads(run.threads)
    model = run.source.build(run.dtype, run.device)
    # A first small run loads libraries and scratch memory that a process needs once.
    _run(model, replace(run, context=min(16, run.context), batch=1))
    gc.collect()
    reset_peak()
    loaded = resident_bytes() or 0
    _run(model, run)
    return Peak(loaded, peak_resident_bytes() or 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(json.dumps(asdict(_peak_in_this_process(pickle.load(sys.stdin.buffer)))))
