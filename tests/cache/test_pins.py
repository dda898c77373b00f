"""Pinned spans of a prompt: never evicted, by whatever rule and whatever else is on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from oracle import cache_of
from reading import BATCHES, padding, run, same_as_masking, tokens

import h2okv
from h2okv.policy import Inputs
from h2okv.policy.scoring import power

SPANS = ((3, 6), (9, 11))
PINNED = {3, 4, 5, 9, 10}
POLICIES = [
    name for name in h2okv.policy_names()
    if name not in ("full", "recent", "sink_recent", "strided", "fixed")
]  # fmt: skip


def missing(sets):
    return [PINNED - head for layer in sets for row in layer for head in row if PINNED - head]


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    scoring=st.sampled_from(["sum", "mean", "decay", "value_norm"]),
    kv_heads=st.sampled_from([1, 2, 4]),
    sink=st.integers(0, 4),
    chunk=st.sampled_from([None, 1, 5, 16]),
    rolls=st.booleans(),
    batch=st.fixed_dictionaries(BATCHES | {"prompt": st.just(30)}),
)
def test_pins_stay_and_dropping_equals_masking(
    make_llama, kept_sets, policy, scoring, kv_heads, sink, chunk, rolls, batch
):
    rule = h2okv.policy.get_rule(policy)
    model = make_llama(kv_heads=kv_heads, seed=batch["seed"])
    decides_once = rule.inputs is Inputs.WINDOW
    can_roll = not (decides_once or rule.inputs is Inputs.KEYS)

    def make_cache(masks):
        cache = cache_of(
            model.config, 8, 3, sink,
            policy=policy,
            scoring=scoring if rule.uses_scores and not decides_once else "sum",
            positions="rolling" if rolls and can_roll else "original",
            evict_every=None if decides_once else chunk,
            masks=masks,
        )  # fmt: skip
        cache.pin(SPANS)
        return cache

    assert not missing(same_as_masking(kept_sets, model, make_cache, **batch))


def test_a_padded_row_equals_the_row_alone(make_llama, kept_sets):
    model, input_ids = make_llama(), tokens(1, 2, 40)
    options, blocks = {"evict_every": 7}, [30, *[1] * 10]
    together = cache_of(model.config, 6, 4, **options)
    together.pin(SPANS)
    run(model, together, input_ids, blocks, padding((8, 0), blocks))
    alone = cache_of(model.config, 6, 4, **options)
    alone.pin(SPANS)
    run(model, alone, input_ids[:1, 8:], [22, *[1] * 10])
    assert [layer[0] for layer in kept_sets(together)] == [layer[0] for layer in kept_sets(alone)]


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


def test_saved_forked_selected_and_reset(make_llama, kept_sets, tmp_path):
    model, input_ids = make_llama(), tokens(3, 2, 60)
    cache = cache_of(model.config, 6, 4)
    cache.pin(SPANS)
    run(model, cache, input_ids[:, :40], [30, *[1] * 10])
    cache.save(tmp_path / "c")
    loaded, forked = h2okv.H2OCache.load(tmp_path / "c", model), cache.fork(2)
    forked.batch_select_indices(torch.tensor([3, 0]))
    with torch.no_grad():
        for continued in (cache, loaded):
            for token in input_ids[:, 40:].split(1, dim=1):
                model(token, past_key_values=continued)
        for token in input_ids[[1, 0], 40:].split(1, dim=1):
            model(token, past_key_values=forked)
    assert kept_sets(loaded) == kept_sets(cache) == [layer[::-1] for layer in kept_sets(forked)]
    assert not missing(kept_sets(loaded))
    cache.reset()
    run(model, cache, input_ids, [60])
    assert missing(kept_sets(cache))  # pins are of one prompt


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
