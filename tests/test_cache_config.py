"""`CacheConfig`: one object for every part of the package."""

import inspect
from dataclasses import fields, replace

import pytest

from h2okv import Budget, CacheConfig, H2OCache
from h2okv.cache_spec import OPTIONS
from h2okv.policy import Inputs


def test_fields_are_the_arguments_of_the_cache():
    arguments = inspect.signature(H2OCache).parameters
    expected = {
        name: parameter.default
        for name, parameter in arguments.items()
        if name not in ("model", "budget")
    }
    assert {field.name: field.default for field in fields(CacheConfig)} == expected


def test_every_field_reaches_the_cache_and_the_text(make_llama):
    """List names and values explicitly: a new field must fail here first."""
    values = {
        "policy": "h2o", "heavy": 7, "recent": 6, "sink": 1, "scoring": "decay", "decay": 0.9,
        "positions": "rolling", "evict_every": 7, "kv_bits": 8,
        "max_tokens": 20, "min_tokens": 2, "seed": 0, "layer_budgets": None,
        "measured": None, "whole_prompts": True, "grows": False,
    }  # fmt: skip
    assert set(values) == {field.name for field in fields(CacheConfig)}
    config = CacheConfig(**values)
    assert H2OCache(make_llama().config, **values).cache_config == config
    text = "h2o:7+6,sink=1,scoring=decay:0.9,positions=rolling,every=prompt+7,bits=8,min=2,max=20"
    assert config.spec == config.label == text and CacheConfig.from_spec(text) == config
    assert {
        "policy", "heavy", "recent", "decay", "measured", "whole_prompts", *OPTIONS.values(),
    } == set(values)  # fmt: skip


def test_records_of_earlier_versions_stay_the_same():
    """Compare with the names of earlier versions; results with others would be recomputed."""
    written = CacheConfig(heavy=3, min_tokens=0).identity()
    assert list(written) == [
        "policy", "heavy", "recent", "sink", "scoring", "decay", "positions", "kv_bits",
        "max_tokens", "seed",
    ]  # fmt: skip
    assert CacheConfig(heavy=3, min_tokens=2).identity() == written | {"min_tokens": 2}


def test_from_dict_inverts_to_dict():
    config = CacheConfig(policy="h2o", heavy=64, recent=0.1, scoring="decay", decay=0.99, sink=4)
    assert CacheConfig.from_dict(config.to_dict()) == config


def test_an_unknown_name_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"'hevy' is unknown; did you mean heavy\?"):
        CacheConfig.from_dict({"hevy": 3})
    with pytest.raises(ValueError, match="values must be an object with names, got 'h2o'"):
        CacheConfig.from_dict("h2o")


@pytest.mark.parametrize(
    ("budget", "amounts"),
    [
        (0.2, (0.1, 0.1)), ("20%", (0.1, 0.1)), ("0.2", (0.1, 0.1)), (64, (32, 32)), (65, (32, 33)),
        ("64", (32, 32)), ("5+0.2", (5, 0.2)), (Budget(5, 7), (5, 7)),
    ],
)  # fmt: skip
def test_a_budget_is_an_argument(make_llama, budget, amounts):
    config = CacheConfig(budget=budget)
    assert (config.heavy, config.recent) == amounts
    assert CacheConfig(heavy=3).with_options(budget=budget, heavy=None).heavy == amounts[0]
    assert H2OCache(make_llama().config, budget=budget).cache_config == config


def test_the_policy_divides_the_budget():
    best = CacheConfig("best", budget=0.2)
    assert best == CacheConfig("best") == CacheConfig(budget=0.2, policy="best")
    assert (best.heavy, best.recent) == (pytest.approx(0.17), pytest.approx(0.03))
    assert CacheConfig().with_options(policy="best") == best
    assert CacheConfig().with_options(policy="best", budget=100).heavy == 85
    assert best.with_options(budget=100).heavy == 85
    for everything in ("full", 1.0):
        full = CacheConfig("best", budget=everything)
        assert full.is_full and full.label == "full" and full.entries(77) == 77


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.2, "heavy": 3}, "budget=0.2 cannot be combined with heavy=3"),
        ({"budget": "a lot"}, "budget='a lot' is not a budget; give a fraction"),
        ({"budget": True}, "budget=True is not a budget"),
        ({"budget": 1}, "budget 1 is too small"),
        ({"budget": 1.5}, "budget 1.5 is out of range"),
        ({"budget": 0.0}, "give"),
        *(
            ({"kv_bits": n}, f"kv_bits must be 8, 6 or 4, got {n!r}")
            for n in (0, 3, True, 8.0, "8")
        ),
        ({"policy": 0.2}, "policy must be a name such as 'best' or 'h2o', got 0.2"),
        ({"sinks": 4}, r"CacheConfig: argument 'sinks' is unknown; did you mean sink\?"),
    ],
)
def test_a_wrong_argument_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**options)


def test_files_without_a_minimum_have_exact_fractions():
    assert CacheConfig.from_dict({"heavy": 0.1}).min_tokens == 0
    exact = CacheConfig(min_tokens=0)
    assert "min_tokens" not in exact.to_record()
    assert CacheConfig.from_dict(exact.to_record()) == exact
    assert CacheConfig.from_dict(CacheConfig().to_record()) == CacheConfig()


def test_entries_and_labels():
    assert CacheConfig(heavy=0.1, recent=0.1).entries(1000) == 200
    assert CacheConfig(heavy=0.1, recent=0.1).entries(37) == 128
    assert CacheConfig(heavy=0.1, recent=0.1).label == "h2o:20%"
    assert CacheConfig(heavy=64, recent=64, sink=4, kv_bits=8).label == "h2o:128,sink=4,bits=8"
    split = CacheConfig(heavy=16, recent=48, scoring="mean")
    assert (split.policy_label, split.budget_label) == ("h2o,scoring=mean", "16+48")


def test_identity_leaves_out_what_a_full_cache_does_not_use():
    full = CacheConfig(policy="full", heavy=3)
    assert full.identity() == CacheConfig(policy="full", sink=7).identity()
    assert CacheConfig(heavy=3).identity() != CacheConfig(heavy=4).identity()


def test_best_resolves_to_its_options(make_llama):
    best = CacheConfig(budget=0.2, policy="best")
    options = {"sink": 4, "scoring": "expected", "layer_budgets": "auto"}
    assert best == CacheConfig("h2o", 0.2 * 0.85, 0.2 - 0.2 * 0.85, **options)
    assert best.label == "best:20%"
    assert best.before_measuring.label == "best:20%,layers=even"
    halved = CacheConfig("best", budget="32+32", sink=2, scoring="decay")
    assert halved == CacheConfig("h2o", 32, 32, 2, "decay", layer_budgets="auto")
    cache = H2OCache(make_llama().config, 12, 4, policy="best", layer_budgets="even")
    assert cache.cache_config == CacheConfig(policy="best", heavy=12, recent=4, layer_budgets=None)
    assert cache.rule.name == "h2o" and cache.rule.effective_inputs is Inputs.QUERIES


def test_best_is_even_where_a_user_says_so():
    assert CacheConfig().layer_budgets is None
    assert CacheConfig(policy="best").layer_budgets == "auto"
    assert CacheConfig(budget="full", policy="best").layer_budgets is None
    for even in (None, "even"):
        assert CacheConfig(policy="best", layer_budgets=even).layer_budgets is None
    factors = ((0.5, 1.5),)
    assert CacheConfig(policy="best", layer_budgets=factors).layer_budgets == factors
    changed = CacheConfig().with_options(policy="best")
    assert changed == CacheConfig(policy="best") == CacheConfig.from_dict(changed.to_dict())
    even = CacheConfig().with_options(policy="best", layer_budgets=None)
    assert even.layer_budgets is None and replace(even, heavy=3).layer_budgets is None


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({}, "best-v5:20%"),
        ({"heavy": 0.1, "recent": 0.1}, "best-v5:10%+10%"),
        ({"heavy": 108, "recent": 20}, "best-v5:128"),
        ({"heavy": 107, "recent": 20, "kv_bits": 4}, "best-v5:127,bits=4"),
        ({"layer_budgets": (0.5, 1.5), "positions": "rolling"}, "best-v5:20%,positions=rolling"),
        ({"sink": 2}, "h2o:17%+3%,sink=2,scoring=expected,layers=auto"),
        ({"measured": None}, "best:20%,layers=by-head-ddd7092d"),
        ({"measured": 7}, "best-v7:20%"),
    ],
    ids=str,
)
def test_labels_name_the_version_of_measured_factors(options, label):
    measured = {"layer_budgets": ((0.5, 1.5),), "measured": 5, "heavy": 0.17, "recent": 0.03}
    config = CacheConfig("best", **(measured | options))
    assert config.label == label
    assert CacheConfig.from_dict(config.to_record()).label == label
    assert config.before_measuring == config


@pytest.mark.parametrize(
    "options", [{"sink": 0}, {"scoring": "sum"}, {"sink": 0, "scoring": "sum"}]
)
def test_best_keeps_given_sinks_and_scoring(make_llama, options):
    expected = CacheConfig("h2o", 12, 4, **({"sink": 4, "scoring": "expected"} | options))
    options["layer_budgets"] = None
    assert CacheConfig("best", 12, 4, **options) == expected
    assert H2OCache(make_llama().config, 12, 4, policy="best", **options).cache_config == expected
    # As a file has it, and as an engine changes it.
    assert CacheConfig.from_dict(expected.to_dict()) == expected == replace(expected, heavy=12)


FRACTIONS = [
    (0.3, 0.1, ((3.5, 0.5), (0, 0))),
    (0.3, 16, ((3.5, 0.5), (0.0, 0.0))),
    (0.6, 16, (1.8, 0.2)),
    (0.6, 0.4, (2.0, 0.0)),
    (0.5, 0.3, ((1.5, 1.3, 0.6, 0.6), (3.0, 0.5, 0.25, 0.25))),
    (0.9, 0.1, (1.004, 1.004)),
]


@pytest.mark.parametrize(("heavy", "recent", "factors"), FRACTIONS)
def test_limited_factors_keep_the_total_budget(heavy, recent, factors):
    config = CacheConfig(heavy=heavy, recent=recent, layer_budgets=factors)
    layers = range(len(factors))
    heads = [head for n in layers for head in config.head_budgets(n) or [config.layer_budget(n)]]
    limit = 1 - recent if isinstance(recent, float) else 1
    assert all(head.heavy <= limit and head.recent == recent for head in heads)
    assert sum(head.heavy for head in heads) == pytest.approx(len(heads) * heavy)
    flat = [
        factor for layer in factors for factor in (layer if isinstance(layer, tuple) else (layer,))
    ]
    # A larger factor gives no smaller budget.
    order = sorted(range(len(heads)), key=lambda index: flat[index])
    in_order = [heads[index].heavy for index in order]
    assert in_order == sorted(in_order)
    tokens = [head.resolve(1000) for head in heads]
    even = config.budget.resolve(1000).total
    assert sum(budget.total for budget in tokens) == pytest.approx(
        len(heads) * even, abs=len(heads)
    )


def test_factors_within_the_prompt_are_unchanged():
    config = CacheConfig(heavy=0.2, recent=0.1, layer_budgets=((0.5, 1.0), (2.0, 0.5)))
    assert [budget.heavy for budget in config.head_budgets(1)] == [0.4, 0.1]
    assert config.layer_budgets == ((0.5, 1.0), (2.0, 0.5))


@pytest.mark.parametrize(
    ("amounts", "factors", "message"),
    [
        ((1, 0), ((4.0, 0.0), (0.0, 0.0)), "a factor of 0 on heavy=1 keeps nothing .* recent=0"),
        ((0.5, 0), (2.0, 0.0), "a factor of 0 on heavy=0.5 keeps nothing"),
        ((4, 0), (1.9, 0.1), "a factor of 0.1 on heavy=4 keeps nothing"),
        ((8, 4), (1.75, 0.25), "a factor of 1.75 makes heavy=8 too large .*; or give smaller"),
    ],
)
def test_unusable_factors_are_refused_as_layer_budgets(make_llama, amounts, factors, message):
    with pytest.raises(ValueError, match="layer_budgets: " + message):
        H2OCache(make_llama().config, *amounts, layer_budgets=factors, max_tokens=17)


def test_a_config_that_says_where_texts_are_cut_gets_no_other_cuts():
    config = CacheConfig(evict_every=7)
    assert CacheConfig().with_cuts(64).evict_every == 64 and config.with_cuts(64) is config


def test_the_former_chunk_is_refused_with_the_present_name():
    with pytest.raises(ValueError, match="prefill_chunk.* did you mean evict_every"):
        CacheConfig.from_dict({"heavy": 3, "prefill_chunk": 8})
    with pytest.raises(ValueError, match="chunk is not an option; evict_every says where"):
        CacheConfig.from_spec("h2o,chunk=8")
