"""Baselines of the H2O paper: the full cache, recent tokens, and chance."""

from __future__ import annotations

import torch
from torch import Tensor

from h2okv.budget import TokenBudget
from h2okv.policy.rule import Rule
from h2okv.policy.scoring import Inputs

# Constants of the splitmix64 finaliser, as signed 64-bit integers.
_MIX_1, _MIX_2, _STEP = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB


class Full(Rule):
    """Keeps every token and H2O's scores beside it."""

    name = "full"
    evicts = False


class Recent(Rule):
    """Keeps the newest tokens; "Local" in the H2O paper (arXiv 2306.14048, section 5)."""

    name = "recent"
    inputs = Inputs.NOTHING

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        return TokenBudget(budget.sink, heavy=0, recent=budget.heavy + budget.recent)


class Random(Rule):
    """Keeps the sinks and the recent window, and random entries in place of the heavy hitters.

    Every eviction draws again. The draw is a hash of seed, layer, head, position and step, not a
    generator's state: a sequence loses the same entries alone, in a batch, and in the simulation.
    """

    name = "random"
    inputs = Inputs.NOTHING

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        heads = torch.arange(positions.shape[1], device=positions.device).view(1, -1, 1)
        key = _mix(heads + 1024 * layer_idx + 1048576 * self.seed)
        draw = _mix(_mix(key + newest) + positions.to(torch.int64))
        # fp32 holds 24 bits exactly.
        return ((draw >> 20) & 0xFFFFFF).to(torch.float32) / 16777216.0


def _mix(value: Tensor) -> Tensor:
    """Scramble int64 values (the splitmix64 finaliser, with logical shifts)."""
    value = value + _STEP
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
