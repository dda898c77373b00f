"""Blocks as long as the budget, budgets as long as the text, and ties."""

import pytest
import torch
from oracle import cache_of
from reading import padding, run, tokens
from transformers import DynamicCache

import h2okv

POLICIES = h2okv.policy_names()


@pytest.mark.parametrize("length", [13, 14, 15, 17])
@pytest.mark.parametrize("options", [{}, {"scoring": "expected"}, {"evict_every": 5}], ids=str)
def test_blocks_as_long_as_the_budget(make_llama, kept_sets, length, options):
    """Where none has to leave nothing is ranked: one token decides."""
    model, input_ids = make_llama(), tokens(1, 2, 40)
    blocks = [length, 1, 1, 3, 34 - length, 1]
    caches, logits = [], []
    for masks in (False, True):
        caches.append(cache_of(model.config, 8, 4, 2, masks=masks, **options))
        logits.append(run(model, caches[-1], input_ids, blocks))
    assert kept_sets(caches[0]) == kept_sets(caches[1])
    torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("masks", [False, True])
def test_budget_of_the_whole_length_is_full_attention(make_llama, policy, masks):
    model, reference = make_llama(), make_llama(attention="sdpa")
    input_ids = tokens(3, 2, 40)
    blocks = [25, 1, 1, 8, 1, 4]
    mask = padding([0, 6], blocks)
    cache = cache_of(model.config, heavy=20, recent=20, policy=policy, masks=masks)
    expected = run(reference, DynamicCache(), input_ids, blocks, mask)
    actual = run(model, cache, input_ids, blocks, mask)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("masks", [False, True])
def test_on_equal_scores_the_older_goes_first(make_llama, kept_sets, masks):
    class Equal(h2okv.Policy):
        name = "equal"

        def priority(self, scores, positions, newest, layer_idx):
            return torch.zeros_like(scores)

    model = make_llama()
    input_ids = tokens(5, 1, 40)
    for blocks in ([20], [20, 1, 1], [20, 1, 6]):
        cache = cache_of(model.config, heavy=6, recent=2, policy=Equal(), masks=masks)
        run(model, cache, input_ids, blocks)
        seen = sum(blocks)
        assert kept_sets(cache)[0][0] == [set(range(seen - 8, seen))] * 2
