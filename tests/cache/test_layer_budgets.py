"""Budgets that differ by layer: the same whole, exact, saved, and measured on the model."""

import pytest
from oracle import cache_of
from reading import tokens

import h2okv

FACTORS = (0.5, 1.75, 0.75)


def test_they_are_measured(make_llama):
    model = make_llama(layers=3)
    # A layer without values changes nothing and needs nothing.
    model.model.layers[1].self_attn.v_proj.weight.data *= 1e-4
    budgets = h2okv.measure_layer_budgets(model, tokens(3, 1, 200), 0.15)
    # The least share is a tenth of 25 entries: two.
    assert budgets[1] == 0.08 and sum(budgets) / 3 == pytest.approx(1, abs=1e-3)
    cache_of(model.config, 0.15, 0.05, layer_budgets=budgets)
    with pytest.raises(ValueError, match="a text of 3 tokens, .* leave nothing to divide"):
        h2okv.measure_layer_budgets(model, tokens(3, 1, 3))
    with pytest.raises(ValueError, match=r"fraction=2 and .* shares from 0 to 1"):
        h2okv.measure_layer_budgets(model, tokens(3, 1, 200), 2)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ((1.0, 1.0), "layer_budgets has 2 factors, and the model 3 layers"),
        ((1.0, 1.0, 2.0), "layer_budgets must be non-negative with mean 1, got mean 1.33333 "),
        ((-1.0, 2.0, 2.0), "must be non-negative with mean 1, got mean 1 and least -1;"),
        ((), "layer_budgets must be non-negative with mean 1, got mean 0 "),
        ("111", "layer_budgets must be .* got '111'"),
        (
            ("1", "1", "1"),
            r"layer_budgets must be .* got \('1', '1', '1'\); h2okv.measure_layer_budgets",
        ),
        ((True, True, True), "layer_budgets must be a number for each layer, or a list"),
        ((("1", "1"),) * 3, "layer_budgets must be a number for each layer, or a list"),
        ((10**400, 1, 1), "layer_budgets must be a number for each layer, or a list"),
        (([[1]], 1, 1), "layer_budgets must be a number for each layer, or a list"),
        ((float("nan"), 1, 1), "layer_budgets must be non-negative with mean 1, got mean nan "),
    ],
)
def test_what_makes_no_sense_is_refused(make_llama, factors, message):
    with pytest.raises(ValueError, match=message):
        cache_of(make_llama(layers=3).config, layer_budgets=factors)


def test_no_layer_is_given_more_than_max_tokens(make_llama):
    config = make_llama(layers=3).config
    options = {"layer_budgets": FACTORS, "max_tokens": 17}  # 8 x 1.75 + 4 are 18
    with pytest.raises(ValueError, match="= 18 tokens is above max_tokens=17"):
        cache_of(config, 8, 4, **options)
    cache_of(config, 8, 3, **options)
