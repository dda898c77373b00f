"""The patterns of the Sparse Transformer, strided and fixed, with and without heavy hitters."""

from __future__ import annotations

from torch import Tensor

from h2okv.budget import TokenBudget
from h2okv.policy.rule import Rule
from h2okv.policy.scoring import Inputs


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
        # In groups of c positions, of which the last one in every block is kept.
        groups = newest // cells + 1
        stride = power_of_two_from(groups // (limit // cells + 1) + 1)
        group = positions // cells.to(positions.dtype)
        return ((group + 1) % stride.to(positions.dtype) == 0) & (limit > 0)


class FixedHeavy(Fixed, StridedHeavy):
    """The fixed pattern with heavy hitters (arXiv 2306.14048, Table 2, "fixed w. H2")."""

    name = "fixed_heavy"


def power_of_two_from(numbers: Tensor) -> Tensor:
    """Return the smallest powers of two not below int64 numbers from 1 to 2 ** 32."""
    filled = numbers - 1
    for shift in (1, 2, 4, 8, 16):
        filled = filled | (filled >> shift)
    return filled + 1
