"""Strided and fixed: what they hold, against the patterns written down in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from oracle import cache_of

from h2okv.budget import TokenBudget
from h2okv.policy import get_rule
from h2okv.policy.baselines import Fixed, power_of_two_from


def strided(newest, limit):
    """Multiples of the smallest power of two that has at most ``limit`` of them."""
    stride = 1
    while limit and len(range(0, newest + 1, stride)) > limit:
        stride *= 2
    return set(range(0, newest + 1, stride)) if limit else set()


def fixed(newest, limit, cells=8):
    """Return the last cells of every block, of the smallest size with at most ``limit`` cells."""
    cells = min(cells, limit)
    if cells == 0:
        return set()
    block = cells
    while True:
        cells_of_pattern = {p for p in range(newest + 1) if p % block >= block - cells}
        # A block that has begun to end counts whole: its other cells are about to come.
        count = cells * len({p // block for p in cells_of_pattern})
        if count <= limit:
            return cells_of_pattern
        block *= 2


def pattern_of(policy, newest, limit):
    positions = torch.arange(newest + 1, dtype=torch.int32).expand(1, 2, -1)
    column = torch.tensor([[[newest]]]), torch.tensor([[[limit]]])
    marked = policy.static_mask(positions, *column)
    assert torch.equal(marked[0, 0], marked[0, 1])
    return set(marked[0, 0].nonzero().flatten().tolist())


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(newest=st.integers(0, 3000), limit=st.integers(0, 90))
def test_the_strided_pattern(newest, limit):
    assert pattern_of(get_rule("strided"), newest, limit) == strided(newest, limit)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(newest=st.integers(0, 3000), limit=st.integers(0, 90), cells=st.sampled_from([1, 3, 8]))
def test_the_fixed_pattern(newest, limit, cells):
    assert pattern_of(Fixed(cells), newest, limit) == fixed(newest, limit, cells)


@pytest.mark.parametrize("policy", [get_rule("strided"), Fixed(), Fixed(3)])
@pytest.mark.parametrize("limit", [1, 7, 20])
def test_what_leaves_a_pattern_stays_out_and_there_is_always_room(policy, limit):
    before = None
    for newest in range(400):
        now = pattern_of(policy, newest, limit)
        assert len(now) <= limit
        if before is not None:
            assert now <= before | {newest}
        before = now


def test_powers_of_two():
    numbers = torch.tensor([1, 2, 3, 4, 5, 8, 9, 1000, 1 << 20, (1 << 20) + 1, (1 << 31) - 1])
    expected = [1, 2, 4, 4, 8, 8, 16, 1024, 1 << 20, 1 << 21, 1 << 31]
    assert power_of_two_from(numbers).tolist() == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("strided", TokenBudget(2, 0, 6, 6)), ("fixed", TokenBudget(2, 0, 6, 6)),
     ("strided_heavy", TokenBudget(2, 5, 4, 3)), ("fixed_heavy", TokenBudget(2, 5, 4, 3))],
)  # fmt: skip
def test_how_the_budget_is_divided(name, expected):
    assert get_rule(name).allocate_budget(TokenBudget(sink=2, heavy=5, recent=7)) == expected


@pytest.mark.parametrize("cells", [0, -1, 2.0, True])
def test_cells_that_make_no_sense(cells):
    with pytest.raises(ValueError, match="cells must be an int of 1 or more, got"):
        Fixed(cells)


def test_a_pattern_has_no_use_for_scores(make_llama):
    with pytest.raises(ValueError, match="no effect with policy='strided'"):
        cache_of(make_llama().config, policy="strided", scoring="mean")
    cache_of(make_llama().config, policy="strided_heavy", scoring="mean")
