"""The caches that are compared."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_hqq_available, is_optimum_quanto_available

import h2okv
from h2okv.cache.layer import ScoredLayer
from h2okv.cache.validation import check_kv_bits
from h2okv.config import Budget, Positions
from h2okv.integration.attention import ATTENTION_NAME

CACHES = ("dynamic", "static", "quantized", "h2o", "kvpress")
"""The caches that can be compared."""
COMPILED = ("static", "h2o")
"""Those whose shapes stay as they are, so that a step can be compiled once."""
BUDGETED = ("static", "h2o", "kvpress")
"""Those of them that keep a budget."""


@dataclass(frozen=True)
class CacheChoice:
    """One cache to measure.

    Attributes:
        name: One of `CACHES`.
        budget: Tokens (int) or a fraction of the prompt (float), half of it for heavy hitters;
            ``None`` for caches that hold everything.
        positions: How H2O places its entries.
        kv_bits: Bits of a number of H2O's keys and values; ``None`` for the model's dtype.
    """

    name: str
    budget: int | float | None = None
    positions: Positions = "original"
    kv_bits: int | None = None

    @property
    def label(self) -> str:
        """How a table calls it."""
        if self.budget is None:
            return self.name
        bits = "" if self.kv_bits is None else f", {self.kv_bits} bits"
        share = isinstance(self.budget, float)
        budget = f"{100 * self.budget:g} %" if share else str(self.budget)
        return f"{self.name} {budget}{bits}"

    def parts(self) -> dict[str, Any]:
        """The budget as `h2okv.H2OCache` takes it."""
        assert self.budget is not None
        if isinstance(self.budget, float):
            return {"heavy": self.budget / 2, "recent": self.budget / 2}
        heavy = self.budget // 2
        return {"heavy": heavy, "recent": self.budget - heavy}

    def entries(self, context: int) -> int:
        """Entries that one KV head holds after a prompt of so many tokens: K, or all."""
        if self.budget is None:
            return context
        return Budget(**self.parts()).resolve(context).total


@dataclass(frozen=True)
class Settings:
    """The combinations to measure, and how.

    Attributes:
        contexts: Lengths of the prompts, in tokens.
        batches: Numbers of sequences.
        budgets: Tokens or fractions of the prompt.
        caches: Names of `CACHES`.
        positions: How H2O places its entries.
        dtypes: Of weights and caches.
        rounds: In each, every cache takes its turn.
        steps: Decode steps of one turn; their mean is one sample.
        prefill_chunk: Tokens of a block of the prompt; ``None`` reads it at once.
        peak: Whether to measure peak memory, in processes of its own.
        compiled: Whether decode steps of `static` and `h2o` run through ``torch.compile``.
        kv_bits: `h2o` runs once more for each of these, with keys and values in so many bits.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    budgets: tuple[int | float, ...]
    caches: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    positions: Positions = "original"
    rounds: int = 5
    steps: int = 8
    prefill_chunk: int | None = None
    peak: bool = True
    compiled: bool = False
    kv_bits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuses what makes no sense."""
        for name, least in (("rounds", 1), ("steps", 1), ("prefill_chunk", 1)):
            self._check_least(name, getattr(self, name), least)
        for context in self.contexts:
            self._check_least("contexts", context, 8)
        for batch in self.batches:
            self._check_least("batches", batch, 1)
        for name in ("contexts", "batches", "budgets", "caches", "dtypes"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"--{name} names nothing; give at least one value")
            self._check_distinct(name, values)
        self._check_distinct("kv-bits", self.kv_bits)
        for bits in self.kv_bits:
            check_kv_bits(bits)
        if self.kv_bits and "h2o" not in self.caches:
            raise ValueError("--kv-bits is about h2o; name it among the --caches, or leave it out")
        for budget in self.budgets:
            _check_budget(budget)
        for name in self.caches:
            if name not in CACHES:
                raise ValueError(
                    f"--caches: {name!r} is not known; choose from {', '.join(CACHES)}"
                )
        if self.positions not in ("original", "rolling"):
            raise ValueError(
                f"--positions {self.positions!r} cannot be measured; choose original or rolling"
            )

    @staticmethod
    def _check_least(name: str, value: int | None, least: int) -> None:
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {value} is too few; give {least} or more")

    @staticmethod
    def _check_distinct(name: str, values: tuple[Any, ...]) -> None:
        if len(set(values)) != len(values):
            raise ValueError(f"--{name} names a value twice; give each once")

    def choices(self) -> list[CacheChoice]:
        """All caches that take turns on one prompt, those that hold everything first."""
        whole = [CacheChoice(name) for name in self.caches if name not in BUDGETED]
        return whole + [
            CacheChoice(name, budget, self.positions, bits)
            for budget in self.budgets
            for name in self.caches
            if name in BUDGETED
            for bits in ((None, *self.kv_bits) if name == "h2o" else (None,))
        ]

    def most_seen(self, context: int) -> int:
        """The most tokens of one sequence: the prompt, and all steps after it."""
        return context + self.rounds * (self.uncounted_steps + self.steps)

    @property
    def uncounted_steps(self) -> int:
        """Steps at the beginning of a turn that are not timed; compiling takes several."""
        return 4 if self.compiled else 1

    def check_window(self, window: int | None) -> None:
        """Refuses contexts that the model cannot read."""
        context = max(self.contexts)
        longest = self.most_seen(context)
        if window is not None and longest > window:
            raise ValueError(
                f"--contexts {context} and {longest - context} decode steps are above the model's"
                f" window of {window} tokens; give a shorter context, or"
                " random weights with another one, such as --shape llama-3-8b,window=65536"
            )


def _check_budget(budget: Any) -> None:
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError(
                f"--budgets {budget:g} is out of range; give a fraction above 0 and up to 1, or"
                " tokens"
            )
    elif budget < 2:
        raise ValueError(f"--budgets {budget} is too few; give 2 tokens or more, or a fraction")


class Contestant(ABC):
    """One cache on a model."""

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


_NOT_INSTALLED = "not installed"
_BITS = 4


class Quantized(Contestant):
    """transformers' `QuantizedCache` with 4 bits, by quanto or HQQ."""

    @classmethod
    def obstacle(cls) -> str | None:
        """See `Contestant`."""
        if is_optimum_quanto_available() or is_hqq_available():
            return None
        return f"{_NOT_INSTALLED} (optimum-quanto or hqq)"

    def new_cache(self, context: int) -> Any:
        """See `Contestant`."""
        backend = "quanto" if is_optimum_quanto_available() else "hqq"
        # HQQ counts axes from the front only.
        return QuantizedCache(backend, self.model.config, nbits=_BITS)


class Kvpress(Contestant):
    """kvpress's `ObservedAttentionPress`, which is H2O's score on the prompt alone.

    It needs eager attention, and so the T x T matrix, for the prompt; steps run on a `DynamicCache`
    of what was kept, which grows.
    """

    attention = "eager"

    @classmethod
    def obstacle(cls) -> str | None:
        """See `Contestant`."""
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
        """See `Contestant`."""
        self.seen = 0
        self.share = self.choice.entries(context) / context
        return DynamicCache(config=self.model.config)

    def read(self, ids: torch.Tensor) -> None:
        """Reads the prompt at once; blocks would be scored one by one."""
        press_class = _import_kvpress().ObservedAttentionPress
        with press_class(compression_ratio=1 - self.share)(self.model):
            # kvpress 0.5 asks the attention's arguments for it; transformers made it up to 5.2.
            places = torch.arange(ids.shape[1], device=ids.device)
            self.logits = self.forward(ids, cache_position=places)
        self.seen = ids.shape[1]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `Contestant`; steps need no matrix, and run on SDPA."""
        self.model.set_attn_implementation("sdpa")
        yield

    def step(self, token: torch.Tensor) -> None:
        """See `Contestant`; the cache does not know how many tokens there were before."""
        positions = torch.full_like(token, self.seen)
        self.logits = self.forward(token, position_ids=positions)
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


_CLASSES: dict[str, type[Contestant]] = {
    "dynamic": Dynamic,
    "static": Static,
    "quantized": Quantized,
    "h2o": H2O,
    "kvpress": Kvpress,
}


def contestant_class(choice: CacheChoice) -> type[Contestant]:
    """Returns the class behind a choice."""
    return _CLASSES[choice.name]


_BATCH, _PROMPT, _STEPS = 2, 96, 8
_BUDGET = 0.2
_LARGEST_ERROR = {torch.float32: 1e-3}
_LARGEST_ERROR_IN_HALF = 5e-2
# Entries of nearly equal score may change places by rounding alone.
_LARGEST_DIFFERENCE = {torch.float32: 0.002}
_LARGEST_DIFFERENCE_IN_HALF = 0.02


class CheckFailedError(Exception):
    """H2O does not compute what it must, so that its speed means nothing."""


@dataclass(frozen=True)
class Check:
    """How far right results were apart.

    Attributes:
        full_error: Largest difference of logits between a cache with K >= length and full
            attention, relative to the largest logit; of packed entries, which round, and a full
            cache that rounds them alike.
        drop_error: The same between dropping and masking a full cache; ``None`` in half
            precision, where two right results part by rounding.
        kept_difference: Share of the entries kept by dropping that masking does not keep.
    """

    full_error: float
    drop_error: float | None
    kept_difference: float


def check_h2o(model: PreTrainedModel, choice: CacheChoice) -> Check:
    """Holds H2O to full attention and to its masking simulation, on a small prompt.

    In half precision rounding may swap entries further up; there only what the first layer keeps
    is compared, whose input is the same. The model's attention implementation is mutated.
    """
    dtype = model.dtype
    is_exact = dtype == torch.float32
    ids = _ids(model)
    everything: dict[str, Any] = {"heavy": _PROMPT, "recent": _PROMPT}
    if choice.kv_bits is None:
        full = _logits(model, ids, DynamicCache(config=model.config), "sdpa")
    else:
        rounding = _cache(model, choice, **everything, simulate=True)
        full = _logits(model, ids, rounding, ATTENTION_NAME)
    whole = _cache(model, choice, **everything)
    largest = full.abs().max()
    error = float((_logits(model, ids, whole, ATTENTION_NAME) - full).abs().max() / largest)
    _hold("with K >= length it differs from full attention", error, _limit(dtype, "error"), dtype)
    dropping = _cache(model, choice, heavy=_BUDGET / 2, recent=_BUDGET / 2)
    masking = _cache(model, choice, heavy=_BUDGET / 2, recent=_BUDGET / 2, simulate=True)
    dropped = _logits(model, ids, dropping, ATTENTION_NAME)
    masked = _logits(model, ids, masking, ATTENTION_NAME)
    drop_error = float((dropped - masked).abs().max() / largest)
    difference = _kept_difference(dropping, masking, first_layer_only=not is_exact)
    _hold("it keeps other entries than its simulation", difference, _limit(dtype, "kept"), dtype)
    if is_exact:
        _hold("it differs from its simulation", drop_error, _limit(dtype, "error"), dtype)
    return Check(error, drop_error if is_exact else None, difference)


def _limit(dtype: torch.dtype, kind: str) -> float:
    if kind == "error":
        return _LARGEST_ERROR.get(dtype, _LARGEST_ERROR_IN_HALF)
    return _LARGEST_DIFFERENCE.get(dtype, _LARGEST_DIFFERENCE_IN_HALF)


def _hold(what: str, error: float, limit: float, dtype: torch.dtype) -> None:
    # Not "error > limit", which NaN would pass.
    if not error <= limit:
        raise CheckFailedError(
            f"the check of H2O in {str(dtype).removeprefix('torch.')} failed: {what} by {error:.2g}"
            f" (at most {limit:g} is rounding), so no speed is reported"
        )


def _ids(model: PreTrainedModel) -> torch.Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (_BATCH, _PROMPT + _STEPS), generator=generator).to(model.device)


def _cache(model: PreTrainedModel, choice: CacheChoice, **options: Any) -> h2okv.H2OCache:
    return h2okv.H2OCache(
        model.config, positions=choice.positions, kv_bits=choice.kv_bits, **options
    )


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache | h2okv.H2OCache, attention: str
) -> torch.Tensor:
    """Logits after the prompt and after each step, fp32 ``[B, 1 + steps, V]``."""
    model.set_attn_implementation(attention)
    outputs = []
    with torch.inference_mode():
        for part in (ids[:, :_PROMPT], *ids[:, _PROMPT:].split(1, dim=1)):
            outputs.append(model(part, past_key_values=cache, logits_to_keep=1).logits.float())
    return torch.cat(outputs, dim=1)


def _kept_difference(
    dropping: h2okv.H2OCache, masking: h2okv.H2OCache, first_layer_only: bool
) -> float:
    """Share of what one cache keeps that the other one does not."""
    kept = differing = 0
    for layer_idx in _evicting_layers(dropping)[: 1 if first_layer_only else None]:
        real, expected = (cache.kept_positions(layer_idx) for cache in (dropping, masking))
        for row, expected_row in zip(real.flatten(0, 1), expected.flatten(0, 1), strict=True):
            held, wanted = (set(r[r >= 0].tolist()) for r in (row, expected_row))
            kept += len(wanted)
            differing += max(len(held - wanted), len(wanted - held))
    return differing / kept


def _evicting_layers(cache: h2okv.H2OCache) -> list[int]:
    return [n for n, layer in enumerate(cache.layers) if isinstance(layer, ScoredLayer)]
