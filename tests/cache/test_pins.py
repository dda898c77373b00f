"""Pinned spans of a prompt: never evicted, by whatever rule and whatever else is on."""

import pytest
import torch
from oracle import cache_of
from reading import run, tokens

from h2okv.policy.scoring import power

SPANS = ((3, 6), (9, 11))
PINNED = {3, 4, 5, 9, 10}


def missing(sets):
    return [PINNED - head for layer in sets for row in layer for head in row if PINNED - head]


def test_without_pins_they_would_go(make_llama, kept_sets):
    model, input_ids = make_llama(), tokens(2, 1, 60)
    sizes = {}
    for spans in ((), SPANS):
        cache = cache_of(model.config, 6, 4)
        cache.pin(spans)
        run(model, cache, input_ids, [40, *[1] * 20])
        sizes[spans] = cache.num_cached_tokens, cache.nbytes
        assert bool(missing(kept_sets(cache))) == (not spans)
    assert sizes[()] == sizes[SPANS]


@pytest.mark.parametrize(
    ("spans", "options", "message"),
    [
        ([(4, 2)], {}, r"pin \(4, 2\) must be \(start, stop\) of tokens"),
        ([(-1, 2)], {}, r"pin \(-1, 2\) must be"),
        ([(1, 2, 3)], {}, "must be .start, stop. of tokens"),
        ([(0.5, 2)], {}, "must be .start, stop. of tokens"),
        ([(5, 9), (0, 6)], {}, r"pins \(0, 6\) and \(5, 9\) overlap"),
        ([(10, 31)], {}, r"pin \(10, 31\) ends after the prompt of 30 tokens; shorten it"),
        ([(10, 20)], {}, "10 tokens are pinned and policy='h2o' keeps 6 heavy"),
        ([(0, 1)], {"policy": "recent"}, "1 tokens are pinned and policy='recent' keeps 0 heavy"),
        ([(0, 1)], {"policy": "topk", "masks": True}, "policy='topk' evicts nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(make_llama, spans, options, message):
    model, input_ids = make_llama(), tokens(1, 1, 31)
    cache = cache_of(model.config, 6, 4, **options)
    with pytest.raises(ValueError, match=message):
        cache.pin(spans)
        run(model, cache, input_ids[:, :30], [30])
    if not options:
        cache.pin([])
        run(model, cache, input_ids, [30, 1])
        with pytest.raises(ValueError, match="has read its prompt already"):
            cache.pin([(0, 1)])


def test_a_pin_outlives_any_decay():
    scores = torch.tensor([[[torch.inf, 1.0, 0.0]]])
    later = scores * power(0.5, torch.tensor([10_000])).view(-1, 1, 1)
    assert later[0, 0, 0] == torch.inf and not later.isnan().any()
