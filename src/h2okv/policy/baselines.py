"""Rules beside H2O: its paper's baselines, and those of later papers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, normalize

from h2okv.budget import TokenBudget
from h2okv.policy.rule import H2O, Heavy, Rule
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


class StreamingLLM(Rule):
    """Keeps the first tokens and the newest ones (StreamingLLM, arXiv 2309.17453, section 3)."""

    name = "sink_recent"
    inputs = Inputs.NOTHING
    default_sink = 4  # the paper's choice

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        sink = min(budget.sink or self.default_sink, budget.total - 1)
        return TokenBudget(sink=sink, heavy=0, recent=budget.total - sink)


class SnapKV(Rule):
    """Keeps the entries that the prompt's last queries attend to (arXiv 2404.14469, section 4).

    The attention of the observation window, the last ``recent`` queries of the prompt, is summed
    for each entry before it and averaged over neighbouring positions; the ``heavy`` highest stay,
    with the window. That is done once: every token after the prompt is kept.

    Unlike the published code, the query heads of a KV head's group choose together (the code
    repeats keys and values for each query head), and padding never counts. ``kernel`` is the odd
    number of positions averaged over; 1 for none.
    """

    name = "snapkv"
    inputs = Inputs.WINDOW

    def __init__(self, kernel: int = 5) -> None:
        if isinstance(kernel, bool) or not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd int of 1 or more, got {kernel!r}.")
        self.kernel = kernel

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        recent = max(budget.recent, 1)  # one query at least
        return TokenBudget(budget.sink, budget.heavy + budget.recent - recent, recent)

    def priority(self, scores: Tensor, positions: Tensor, newest: Tensor, layer_idx: int) -> Tensor:
        order = positions.argsort(dim=-1, stable=True)
        in_order = scores.masked_fill(positions < 0, 0.0).gather(-1, order)
        pooled = avg_pool1d(in_order, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.empty_like(scores).scatter_(-1, order, pooled)


class KeyDiff(Rule):
    """Keeps the keys that point away from their mean (KeyDiff, arXiv 2504.15364, section 3).

    A key's rank is minus its cosine to the mean of the directions of all cached keys. It needs no
    attention, so a prompt is read by fused attention alone. The paper has no recent part; give
    ``recent=0`` for that. Keys are taken as they are cached: rotated to
    their positions in the text. Two keys differ equally from their mean: the older is evicted.
    """

    name = "keydiff"
    inputs = Inputs.KEYS

    def key_priority(self, keys: Tensor, positions: Tensor) -> Tensor:
        directions = normalize(keys.float(), dim=-1)
        is_entry = (positions >= 0).unsqueeze(-1)
        mean = (directions * is_entry).sum(dim=2, keepdim=True)
        ranks = -(directions * normalize(mean, dim=-1)).sum(dim=-1)
        # Rounding would decide the tie of two keys.
        return ranks.masked_fill(is_entry.sum(dim=2) <= 2, 0.0)


class Strided(Rule):
    """Keeps a recent window and every l-th position (Sparse Transformer, arXiv 1904.10509, 4.2).

    One of the baselines of the H2O paper (arXiv 2306.14048, Table 2). There a query sees the
    positions whose distance to it is a multiple of the stride; with eviction a later query cannot
    see what an earlier one dropped, so here the positions themselves are the multiples. The stride
    is the smallest power of two whose multiples fit into their part of the budget: it doubles as
    the text grows, and every second multiple is evicted.

    The budget is divided in halves, one for the window and one for the multiples. Room that the
    multiples leave goes to the window.
    """

    name = "strided"
    inputs = Inputs.NOTHING

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        total = budget.heavy + budget.recent
        return TokenBudget(budget.sink, heavy=0, recent=total - total // 2, num_static=total // 2)

    def static_mask(self, positions: Tensor, newest: Tensor, limit: Tensor) -> Tensor:
        stride = power_of_two_from(newest // limit.clamp(min=1) + 1)
        return (positions % stride.to(positions.dtype) == 0) & (limit > 0)


class StridedHeavy(Strided):
    """The strided pattern with heavy hitters (arXiv 2306.14048, Table 2, "strided w. H2").

    The heavy part is for the highest accumulated attention, the recent part for the pattern, half
    of it for the window and half for the multiples. Room that these leave goes to heavy hitters.
    """

    name = "strided_heavy"
    inputs = Inputs.SUMS

    def allocate_budget(self, budget: TokenBudget) -> TokenBudget:
        half = budget.recent // 2
        return TokenBudget(budget.sink, budget.heavy, budget.recent - half, num_static=half)


class Fixed(Strided):
    """Keeps a recent window and the last cells of every block (arXiv 1904.10509, section 4.2).

    One of the baselines of the H2O paper (arXiv 2306.14048, Table 2). The text is cut into blocks
    of l positions, and every later query sees the last c of each block. Here l is c times the
    smallest power of two with which these cells fit into their part of the budget, so it doubles
    as the text grows. The other part of the pattern, a query's own block, is the recent window: a
    cache of fixed size has room for a full block at all times, and fills it.

    The budget is divided as for `Strided`. Of a block ``cells`` are kept, 8 as in the Sparse
    Transformer, or all of their part of the budget if that is less.
    """

    name = "fixed"

    def __init__(self, cells: int = 8) -> None:
        if isinstance(cells, bool) or not isinstance(cells, int) or cells < 1:
            raise ValueError(f"cells must be an int of 1 or more, got {cells!r}.")
        self.cells = cells

    def static_mask(self, positions: Tensor, newest: Tensor, limit: Tensor) -> Tensor:
        cells = limit.clamp(min=1, max=self.cells)
        # Positions form groups of c cells; the last group of each stride is kept.
        groups = newest // cells + 1
        stride = power_of_two_from(groups // (limit // cells + 1) + 1)
        group = positions // cells.to(positions.dtype)
        return ((group + 1) % stride.to(positions.dtype) == 0) & (limit > 0)


class FixedHeavy(Fixed, StridedHeavy):
    """The fixed pattern with heavy hitters (arXiv 2306.14048, Table 2, "fixed w. H2")."""

    name = "fixed_heavy"


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


def power_of_two_from(numbers: Tensor) -> Tensor:
    """Return the smallest powers of two not below int64 numbers from 1 to 2 ** 32."""
    filled = numbers - 1
    for shift in (1, 2, 4, 8, 16):
        filled = filled | (filled >> shift)
    return filled + 1


def _mix(value: Tensor) -> Tensor:
    """Scramble int64 values (the splitmix64 finaliser, with logical shifts)."""
    value = value + _STEP
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


RULES: tuple[type[Rule], ...] = (
    Full, Recent, StreamingLLM, H2O, Heavy, Random, Strided, StridedHeavy, Fixed, FixedHeavy,
    SnapKV, KeyDiff,
)  # fmt: skip
"""The rules of the package."""
