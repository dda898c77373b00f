"""The fixed pattern of the Sparse Transformer, with and without heavy hitters."""

from __future__ import annotations

from torch import Tensor

from h2okv.policy.strided import StridedHeavyPolicy, StridedPolicy, power_of_two_from


class FixedPolicy(StridedPolicy):
    """Keeps a recent window and the last cells of every block (arXiv 1904.10509, section 4.2).

    One of the baselines of the H2O paper (arXiv 2306.14048, Table 2). The text is cut into blocks
    of l positions, and the last c of each block are seen by all that comes later. Here l is c times
    the smallest power of two with which these cells fit into their part of the budget, so that it
    doubles as the text grows. The other part of the pattern, a query's own block, is the recent
    window: a cache of fixed size has a whole block's room at all times, and fills it.

    The budget is divided as for `StridedPolicy`.

    Args:
        cells: c; 8 as in the Sparse Transformer, or all of their part of the budget if that is
            less.
    """

    name = "fixed"

    def __init__(self, cells: int = 8) -> None:
        if isinstance(cells, bool) or not isinstance(cells, int) or cells < 1:
            raise ValueError(f"cells={cells!r} makes no block's end; give an int of 1 or more.")
        self.cells = cells

    def static_mask(self, positions: Tensor, newest: Tensor, limit: Tensor) -> Tensor:
        """Marks the last cells of every block."""
        cells = limit.clamp(min=1, max=self.cells)
        # In groups of c positions, of which the last one in every block is kept.
        groups = newest // cells + 1
        stride = power_of_two_from(groups // (limit // cells + 1) + 1)
        group = positions // cells.to(positions.dtype)
        return ((group + 1) % stride.to(positions.dtype) == 0) & (limit > 0)


class FixedHeavyPolicy(FixedPolicy, StridedHeavyPolicy):
    """The fixed pattern with heavy hitters (arXiv 2306.14048, Table 2, "fixed w. H2").

    The budget is divided as for `StridedHeavyPolicy`.

    Args:
        cells: as for `FixedPolicy`.
    """

    name = "fixed_heavy"
