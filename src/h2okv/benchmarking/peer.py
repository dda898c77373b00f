"""The caches of other packages, where those are installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from h2okv.benchmarking.contestant import Contestant, one_line

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
