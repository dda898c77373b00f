"""Scores other than the sum: numbers that stay finite, and what is refused."""

import pytest
import torch
from oracle import cache_of
from reading import run, tokens


def test_a_long_prompt_does_not_overflow(make_llama):
    """Weights far below what fp32 can hold are zero, not NaN."""
    model, input_ids = make_llama(layers=1), tokens(1, 1, 400)
    cache = cache_of(model.config, 5, 5, scoring="decay", decay=0.01)
    run(model, cache, input_ids, [380, *[1] * 20])
    cache.check_integrity()
    assert bool(torch.isfinite(cache.scores(0)).all())


def test_the_sum_needs_nothing_else(make_llama):
    model, input_ids = make_llama(), tokens(5, 1, 40)
    cache = cache_of(model.config, 5, 5)
    run(model, cache, input_ids, [40])
    layer = cache.layers[0]
    assert layer.rule.is_plain_sum and layer.state.value_weights is None
    assert layer._decayed(layer.state.scores, 1) is layer.state.scores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "means"}, "scoring 'means' is unknown; did you mean mean"),
        ({"scoring": "l2"}, "scoring 'l2' is unknown; choose from sum, mean, decay"),
        ({"scoring": "decay", "decay": 0.0}, "decay must be a factor .* got 0.0"),
        ({"scoring": "decay", "decay": 1.01}, "decay must be a factor .* got 1.01"),
        ({"scoring": "decay", "decay": float("nan")}, "decay must be a factor .* got nan"),
        ({"scoring": "decay", "decay": True}, "decay must be a factor .* got True"),
        ({"decay": 0.9}, "decay=0.9 has no effect with scoring='sum'"),
        ({"scoring": "mean", "decay": 0.9}, "decay=0.9 has no effect with scoring='mean'"),
        ({"scoring": "value_norm", "decay": 2.0}, "decay must be a factor .* got 2.0"),
        ({"scoring": "mean", "policy": "recent"}, "no effect with policy='recent'"),
        ({"scoring": "decay", "policy": "random"}, "no effect with policy='random'"),
    ],
)
def test_what_makes_no_sense_is_refused(make_llama, options, message):
    with pytest.raises(ValueError, match=message):
        cache_of(make_llama().config, **options)
