"""What a cache's layers do once per forward, to synchronize with the device only once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from h2okv.budget import Budget, TokenBudget
from h2okv.ops.append import Appended, finish_steps
from h2okv.policy import Rule

_Totals = tuple[tuple[int, ...], ...]
_T = TypeVar("_T")


class LayerBudgets(NamedTuple):
    """The budgets of one layer for the sequences of a prompt."""

    budgets: list[TokenBudget]  # of each sequence, the largest of its heads'
    totals: _Totals  # K of each sequence, and of each head where they differ
    # int64 [B * (3 + H')]: each part of all sequences, then the totals.
    numbers: Tensor


class Forward:
    """Copies budgets to the device once, and checks once that attention is finite.

    One object for all layers of a cache; a layer without a cache has one for itself.
    """

    # Whether steps leave out what the host counts, as `H2OCache.begin_step` and `end_step` do it.
    leaves_host = False
    # Of such a step: which rows of a pool have a sequence, bool [B, 1]. Other rows change nothing.
    live: Tensor | None = None
    # What recorded blocks add to, a number for each layer (`check`): they ask the device nothing.
    sums: Tensor | None = None
    # Steps to be finished when the forward ends; None outside one, where a layer is called alone.
    appended: list[Appended] | None = None

    def __init__(self) -> None:
        self._budgets: list[tuple[Rule, Budget, Sequence[Budget] | None]] = []
        self.num_layers = 0
        self._reset()

    def begin(self) -> None:
        """Begin a forward of all layers, also after one that was interrupted; mutates."""
        self._reset()
        self.appended = []

    def _reset(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []
        self._shared: dict[Any, Any] = {}

    def shared(self, key: Any, compute: Callable[[], _T]) -> _T:
        """Return ``compute()``, which the first layer calls that asks for `key` in a forward."""
        if torch.compiler.is_compiling():
            return compute()
        if key not in self._shared:
            self._shared[key] = compute()
        result: _T = self._shared[key]
        return result

    def forget_shared(self) -> None:
        """Forget what layers share, as a cut may end outside a forward; mutates."""
        self._shared = {}

    def zeros(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return fp32 zeros that nothing may write to."""
        zero = self.shared(
            ("zero", device), lambda: torch.zeros((), dtype=torch.float32, device=device)
        )
        return zero.expand(tuple(shape))

    def add_layer(self, rule: Rule, budget: Budget, by_head: Sequence[Budget] | None) -> int:
        """Note a layer's budget, and that of each head where they differ; returns its number."""
        self._budgets.append((rule, budget, by_head))
        self.num_layers = len(self._budgets)
        return self.num_layers - 1

    def budgets(
        self, number: int, lengths: list[int], device: torch.device, seen: list[int] | None = None
    ) -> LayerBudgets:
        """Return a layer's budgets for prompts of these real tokens, ``[B]``, and those seen."""
        texts = tuple(zip(lengths, seen or lengths, strict=True))
        return self.shared(("budgets", texts, device), lambda: self._resolve(texts, device))[number]

    def _resolve(self, texts: Sequence[tuple[int, int]], device: torch.device) -> Any:
        """Resolve the budgets of all layers, with one copy to the device."""
        layers, rows = [], []
        for rule, budget, by_head in self._budgets:
            heads = [
                [rule.allocate_budget(option.resolve(*text)) for option in by_head or (budget,)]
                for text in texts
            ]
            largest = [max(budgets, key=lambda option: option.total) for budgets in heads]
            totals = tuple(tuple(option.total for option in budgets) for budgets in heads)
            layers.append((largest, totals))
            fields = [(budget.sink, budget.recent, budget.num_static) for budget in largest]
            rows.append([number for row in (*zip(*fields, strict=True), *totals) for number in row])
        # Not from the list to the device, which would wait for all that it has to do before.
        joined = torch.tensor(sum(rows, []), dtype=torch.int64, device="cpu")
        slices = joined.to(device, non_blocking=True).split([len(row) for row in rows])
        return [
            LayerBudgets(*layer, numbers) for layer, numbers in zip(layers, slices, strict=True)
        ]

    def add_step(self, step: Appended, at_once: bool) -> None:
        """Note a layer's step, to be finished when the forward ends, or at once; mutates both."""
        if self.appended is None:
            finish_steps([step])
            return
        self.appended.append(step)
        if at_once:
            self.finish_steps()

    def finish_steps(self) -> None:
        """Finish the steps noted so far; mutates their layers' states."""
        if self.appended:
            steps, self.appended = self.appended, []
            finish_steps(steps)

    def counts(self, real: Tensor) -> tuple[int, ...]:
        """Return the real tokens of each sequence of a block, of bool ``[B, T]``.

        Waits for the device once in a forward, whose layers get views of one mask.
        """
        key = "padding", place_of(real)  # with the mask, lest another takes its place
        return self.shared(key, lambda: (tuple(real.sum(dim=1).tolist()), real))[0]

    def check_later(self, layer_idx: int, sums: Tensor) -> None:
        """Note numbers of a layer that must be finite when the forward ends."""
        # One number tells of all, in a third of the operations.
        total = sums.sum(dtype=torch.float32)
        if self.sums is None:
            self._sums.append((layer_idx, total))
        else:
            self.sums[layer_idx] += total

    def end(self, dtype: torch.dtype) -> None:
        """Finish steps, forget the prompt's budgets; refuse numbers that are not finite."""
        self.finish_steps()
        self.appended = None
        sums, self._sums = self._sums, []
        self.forget_shared()
        if not sums:
            return
        layers, totals = zip(*sums, strict=True)
        numbers = torch.stack([total.to(totals[-1].device) for total in totals])
        self.check(numbers, layers, dtype)

    @staticmethod
    def check(sums: Tensor, layers: Iterable[int], dtype: torch.dtype) -> None:
        """Refuse numbers of layers, ``[L]``, that are not finite; waits for the device."""
        for layer_idx, number in zip(layers, sums.tolist(), strict=True):
            if not math.isfinite(number):
                raise ValueError(
                    f"attention of layer {layer_idx} is not finite (NaN or infinity); check the "
                    f"model's weights, or use a wider dtype than {dtype}."
                )


def place_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return what is equal for views of the same numbers, without reading them."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride())
