"""`CacheConfig`: one object for every part of the package."""

import inspect

import pytest

from h2okv import CacheConfig, H2OCache


def test_fields_are_the_arguments_of_the_cache():
    arguments = inspect.signature(H2OCache.__init__).parameters
    wanted = {
        name: parameter.default
        for name, parameter in arguments.items()
        if name not in ("self", "config", "simulate")
    }
    assert CacheConfig().to_dict() == wanted


def test_a_dict_comes_back():
    config = CacheConfig(policy="h2o", heavy=64, recent=0.1, scoring="decay", decay=0.99, sink=4)
    assert CacheConfig.from_dict(config.to_dict()) == config


def test_an_unknown_name_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"'hevy' is unknown; did you mean heavy\?"):
        CacheConfig.from_dict({"hevy": 3})


@pytest.mark.parametrize(
    ("budget", "fraction", "parts"),
    [(0.2, 0.5, (0.1, 0.1)), (64, 0.25, (16, 48)), (65, 0.5, (32, 33)), (0.5, 1.0, (0.5, 0.0))],
)
def test_a_budget_is_divided(budget, fraction, parts):
    config = CacheConfig.from_budget(budget, fraction)
    assert (config.heavy, config.recent) == parts
    assert type(config.heavy) is type(budget)


@pytest.mark.parametrize("budget", [None, 1.0])
def test_a_budget_of_everything_is_the_full_cache(budget):
    config = CacheConfig.from_budget(budget, policy="h2o")
    assert config.is_full and config.label == "full" and config.entries(77) == 77


@pytest.mark.parametrize(("budget", "fraction"), [(0.0, 0.5), (1.5, 0.5), (1, 0.5), (64, 1.5)])
def test_a_senseless_budget_is_refused(budget, fraction):
    with pytest.raises(ValueError, match="give"):
        CacheConfig.from_budget(budget, fraction)


def test_entries_and_labels():
    assert CacheConfig(heavy=0.1, recent=0.1).entries(1000) == 200
    assert CacheConfig(heavy=0.1, recent=0.1).label == "h2o, 20%"
    assert CacheConfig(heavy=64, recent=64, sink=4, kv_bits=8).label == "h2o, sink 4, 8 bits, 128"
    assert CacheConfig(heavy=16, recent=48).policy_label == "h2o, heavy 25%"


def test_identity_leaves_out_what_a_full_cache_does_not_use():
    full = CacheConfig(policy="full", heavy=3)
    assert full.identity() == CacheConfig(policy="full", sink=7).identity()
    assert CacheConfig(heavy=3).identity() != CacheConfig(heavy=4).identity()


def test_best_says_what_it_is(make_llama):
    best = CacheConfig.from_budget(0.2, policy="best")
    assert best == CacheConfig("h2o", 0.2 * 0.75, 0.2 - 0.2 * 0.75, 4, "expected")
    assert best.label == "h2o, heavy 75%, sink 4, expected, 20%"
    assert CacheConfig.from_budget(64, 0.5, policy="best", sink=2, scoring="decay") == CacheConfig(
        "h2o", 32, 32, 2, "decay"
    )
    cache = H2OCache(make_llama().config, 12, 4, policy="best")
    assert cache.cache_config == CacheConfig(policy="best", heavy=12, recent=4)
    assert cache.policy.name == "h2o" and cache.scoring.looks_ahead
