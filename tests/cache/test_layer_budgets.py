"""Budgets that differ by layer: the same whole, exact, saved, and measured on the model."""

import pytest
import torch
from oracle import cache_of
from reading import run, tokens

import h2okv

FACTORS = (0.5, 1.75, 0.75)


@pytest.mark.parametrize("budget", [(8, 4), (0.2, 0.1), (0.5, 4)])
@pytest.mark.parametrize("options", [{}, {"positions": "rolling", "evict_every": 15}], ids=str)
def test_dropping_equals_masking_and_each_layer_keeps_its_own(
    make_llama, kept_sets, budget, options
):
    model, input_ids, blocks = make_llama(layers=3), tokens(1, 2, 60), [40, *[1] * 12, 8]
    results = []
    for masks in (False, True):
        cache = cache_of(model.config, *budget, layer_budgets=FACTORS, masks=masks, **options)
        cache.expect(40)
        results.append((run(model, cache, input_ids, blocks), kept_sets(cache)))
        cache.check_integrity()
    (dropped, remaining), (masked, alive) = results
    assert remaining == alive
    torch.testing.assert_close(dropped, masked, atol=2e-4, rtol=1e-4)
    heavy, recent = (size if isinstance(size, int) else int(size * 40) for size in budget)
    sizes = [len(layer[0][0]) for layer in remaining]
    assert sizes == [int(heavy * factor) + recent for factor in FACTORS]
    uniform = cache_of(model.config, *budget, **options)
    uniform.expect(40)
    run(model, uniform, input_ids, blocks)
    assert sum(sizes) == sum(len(layer[0][0]) for layer in kept_sets(uniform))


def test_saved_and_loaded(make_llama, kept_sets, tmp_path):
    model, input_ids = make_llama(layers=3), tokens(2, 1, 60)
    cache = cache_of(model.config, 8, 4, layer_budgets=FACTORS)
    run(model, cache, input_ids[:, :50], [40, *[1] * 10])
    cache.save(tmp_path / "c")
    loaded = h2okv.H2OCache.load(tmp_path / "c", model)
    assert loaded.cache_config == cache.cache_config
    for continued in (cache, loaded):
        run(model, continued, input_ids[:, 50:], [1] * 10)
    assert kept_sets(cache) == kept_sets(loaded)


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
