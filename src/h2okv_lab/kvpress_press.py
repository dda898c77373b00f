"""`H2OPress`: an `H2OCache` as a press of kvpress, for its pipeline, evaluation and leaderboard."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from h2okv.cache import CACHE, CacheLayer, H2OCache
from h2okv.cache.argument import cache_in
from h2okv.cache_spec import parse_amount
from h2okv.integration.enable import enable
from h2okv.ops.compaction import compact
from h2okv.records import short_repr


@dataclass
class H2OPress:
    """Compress the prompt of a kvpress pipeline as `H2OCache` does; what stays is the same.

        press = H2OPress(policy="best", budget="20%")
        pipe(context, question=question, press=press)["answer"]

    The prompt is read into an `H2OCache`, and what that holds moves into the pipeline's cache. As
    in every press, nothing is evicted from the question and the answer. Where heads hold different
    numbers of entries, rows are as long as the longest one, and kvpress hides the rest of them.

    Args:
        policy: a policy with options, as `CacheConfig.from_spec` reads them: ``"best,every=128"``.
        budget: a fraction of the prompt (0.2 or ``"20%"``), tokens, or ``"full"``; at most
            ``every`` entries more stay, which wait for the next eviction.
    """

    policy: str = "best"
    budget: float | int | str = 0.2

    @property
    def compression_ratio(self) -> float:
        """The fraction of the prompt that is evicted, which kvpress' evaluation sets.

        Raises:
            AttributeError: if the budget is a number of tokens.
        """
        amount = parse_amount(str(self.budget))
        if self.budget != "full" and not isinstance(amount, float):
            raise AttributeError(f"budget={self.budget!r} is no fraction of the prompt")
        return 0.0 if amount is None else 1 - amount

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        if not 0 <= ratio < 1:
            raise ValueError(
                f"compression_ratio must be from 0 to below 1, got {short_repr(ratio)}."
            )
        self.budget = round(1 - ratio, 9) if ratio else "full"

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Compress every prompt that the model reads inside a ``with`` block.

        Args:
            model: the model of the pipeline; its attention is ``"h2o"`` inside the block.

        Raises:
            ValueError: if H2O does not support the model, a layer is not full attention, positions
                are not original, or heads differ and kvpress is not installed.
        """
        decoder: Any = model.get_decoder()
        # Before there are hooks: it may measure the model.
        empty = H2OCache(model, self.policy, budget=self.budget)
        _check_layers(empty)
        originals: list[Any] = []  # the pipeline's cache of the forward that runs

        def lend(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            target = cache_in(kwargs)
            if target is None or target.get_seq_length():
                return None  # a question
            others = {n: v for n, v in kwargs.items() if n not in ("cache", "past_key_values")}
            originals.append(target)
            return args, {**others, CACHE: H2OCache.from_config(model, empty.cache_config)}

        def take(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            cache = cache_in(kwargs)
            if not isinstance(cache, H2OCache):
                return
            target = originals.pop()
            attention = [layer.self_attn for layer in decoder.layers]
            for module, hidden in zip(attention, _move(cache, target), strict=True):
                module.masked_key_indices = hidden
            for name in [name for name, value in output.items() if value is cache]:
                output[name] = target

        with enable(model):
            hooks = (
                decoder.register_forward_pre_hook(lend, with_kwargs=True),
                decoder.register_forward_hook(take, with_kwargs=True),
            )
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()


def _check_layers(cache: H2OCache) -> None:
    """Refuse what kvpress cannot continue from: it appends keys at positions in the text."""
    kinds = {type(layer).__name__ for layer in cache.layers if not isinstance(layer, CacheLayer)}
    positions = cache.cache_config.positions
    kinds |= {f"positions={positions}"} if positions != "original" else set()
    kinds |= {"latents" for layer in cache.layers if getattr(layer, "latent", None)}
    if kinds:
        raise ValueError(
            f"H2OPress: kvpress cannot continue from {', '.join(sorted(kinds))}; use H2OCache"
            " itself."
        )


@torch.no_grad()
def _move(cache: H2OCache, target: Any) -> list[tuple[torch.Tensor, ...] | None]:
    """Copy entries into an empty cache, ``[B, H, S, D]`` with one S for all layers; mutates it.

    Returns:
        For each layer the empty slots as kvpress hides them, or ``None`` without any.
    """
    layers: list[Any] = cache.layers
    positions = [cache.kept_positions(number) for number in range(len(layers))]
    num_slots = max(int((row >= 0).sum(dim=-1).max()) for row in positions)
    hidden = []
    for number, (layer, row) in enumerate(zip(layers, positions, strict=True)):
        state, storage = layer.state, layer.storage
        keys, values = state.by_head("keys", "values")
        order = (row < 0).to(torch.uint8).argsort(dim=-1, stable=True)[..., :num_slots]
        states = (
            storage.keys.read(keys, layer.dtype, state.key_transform),
            storage.values.read(values, layer.dtype),
        )
        target.update(*(compact(x, order, num_slots) for x in states), number)
        is_empty = pad(row.gather(-1, order), (0, num_slots - order.shape[-1]), value=-1) < 0
        hidden.append(is_empty.nonzero(as_tuple=True) if bool(is_empty.any()) else None)
    if any(indices is not None for indices in hidden):
        _check_kvpress()
    return hidden


def _check_kvpress() -> None:
    """Import kvpress, which makes attention hide the slots that it is given."""
    try:
        importlib.import_module("kvpress")
    except ImportError as error:
        raise ValueError(
            "H2OPress: kvpress is not installed, and only it can hide the empty slots of heads with"
            " budgets of different sizes; pip install kvpress==0.5.5, or give layers=even."
        ) from error
