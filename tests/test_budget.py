import pytest

from h2okv import Budget, CacheConfig
from h2okv.budget import TokenBudget


def test_fractions_are_of_the_prompt():
    tokens = Budget(heavy=0.1, recent=0.29, min_tokens=0).resolve(100)
    assert (tokens.heavy, tokens.recent, tokens.sink, tokens.total) == (10, 29, 0, 39)


def test_a_fraction_of_a_short_prompt_keeps_a_token():
    tokens = Budget(min_tokens=0).resolve(3)
    assert (tokens.heavy, tokens.recent) == (1, 1)


def test_tokens_and_fractions_mix():
    tokens = Budget(heavy=7, recent=0.5, sink=2, min_tokens=0).resolve(11)
    assert (tokens.sink, tokens.heavy, tokens.recent) == (2, 7, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heavy": 0, "recent": 0}, "keep nothing"),
        ({"heavy": 0.0, "recent": 0.0, "sink": 4}, "keep nothing"),
        ({"heavy": -1}, "heavy=-1 is negative"),
        ({"recent": -0.1}, r"recent=-0\.1 is not a fraction"),
        ({"heavy": 1.5}, r"heavy=1\.5 is not a fraction"), ({"heavy": float("nan")}, "heavy=nan"),
        ({"heavy": 0.7, "recent": 0.7}, "at most 1"), ({"heavy": True}, "heavy=True"),
        ({"heavy": "0.1"}, "heavy='0.1'"), ({"sink": -1}, "sink=-1"), ({"sink": 1.1}, r"sink=1\.1"),
        ({"heavy": 60, "recent": 50, "max_tokens": 100}, "110 tokens is above max_tokens=100"),
        ({"max_tokens": 0}, "max_tokens=0"), ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 0.5}, r"min_tokens=0\.5"),
    ],
)  # fmt: skip
def test_invalid_budgets_are_refused_by_name_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        Budget(**options)


def test_the_whole_prompt_may_be_sinks():
    budget = Budget(heavy=48, recent=0.1, sink=1.0)
    assert budget.is_relative and Budget(48, 16, sink=0.5).is_relative
    assert budget.resolve(1000) == TokenBudget(1000, 48, 100)
    assert budget.resolve(0) == TokenBudget(0, 48, 64)
    with pytest.raises(ValueError, match="= 1148 tokens is above max_tokens=500"):
        Budget(48, 0.1, sink=1.0, max_tokens=500).resolve(1000)


def test_a_fraction_is_checked_against_the_maximum_when_the_prompt_is_known():
    budget = Budget(heavy=0.5, recent=0.5, max_tokens=100)
    assert budget.resolve(100).total == 100
    with pytest.raises(ValueError, match="above max_tokens=100"):
        budget.resolve(200)


def test_fractions_of_a_short_prompt_are_raised():
    budget = Budget(heavy=0.1, recent=0.1, min_tokens=64)
    assert budget.resolve(40) == TokenBudget(0, 64, 64)
    assert budget.resolve(2000) == TokenBudget(0, 200, 200)
    assert Budget(heavy=5, recent=0.0, min_tokens=64).resolve(40) == TokenBudget(0, 5, 0)
    config = CacheConfig()
    assert config.entries(40) == 128 and config.identity()["min_tokens"] == 64
    exact = CacheConfig(min_tokens=0)
    assert exact.entries(40) == 8 and "min_tokens" not in exact.identity()


def test_the_default_minimum_is_of_fractions_and_within_the_maximum():
    assert Budget().min_tokens == 64 and Budget(6, 3).min_tokens == 0
    assert Budget(6, 3).resolve(1000) == TokenBudget(0, 6, 3)
    assert Budget(0.1, 0.1, sink=4, max_tokens=50).resolve(40) == TokenBudget(4, 23, 23)
    assert Budget(0.1, 30, max_tokens=50).resolve(40) == TokenBudget(0, 20, 30)
    # A fraction of 0 keeps nothing, whatever the minimum.
    assert Budget(0.0, 0.1).resolve(40) == TokenBudget(0, 0, 64)
