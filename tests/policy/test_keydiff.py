"""KeyDiff: the published ranking in loops, and prompts without scores."""

import pytest
import torch
from oracle import cache_of

import h2okv
from h2okv.policy import Inputs
from h2okv.policy.baselines import KeyDiff


@pytest.mark.parametrize("masks", [False, True])
@torch.no_grad()
def test_of_two_keys_the_older_goes(make_llama, kept_sets, masks):
    """Both are equally far from their mean, whatever rounding makes of it."""
    for seed in range(5):
        model = make_llama(seed=seed)
        input_ids = torch.randint(2, 97, (1, 24), generator=torch.Generator().manual_seed(seed))
        for prompt in (1, 2):
            cache = cache_of(model.config, 1, 0, policy="keydiff", masks=masks)
            h2okv.prefill(model, input_ids[:, :prompt], cache)
            for token in range(prompt, 24):
                model(input_ids[:, token : token + 1], past_key_values=cache)
                assert kept_sets(cache) == [[[{token}] * 2]] * 2


def test_rolling_is_refused(make_llama):
    with pytest.raises(ValueError, match="differ by rounding alone; use positions='original'"):
        cache_of(make_llama().config, policy="keydiff", positions="rolling")


def test_no_scores_are_made_of_a_prompt(make_llama):
    model = make_llama()
    input_ids = torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(6))
    cache = cache_of(model.config, 8, 4, policy="keydiff")
    h2okv.prefill(model, input_ids, cache)
    assert not cache.scores(0).any()


def test_a_policy_without_its_ranking_says_so():
    class Bare(h2okv.Rule):
        name = "bare"
        inputs = Inputs.KEYS

    with pytest.raises(NotImplementedError, match="'bare' sees keys, so add key_priority"):
        Bare().key_priority(torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2))


def test_an_empty_slot_has_no_say():
    keys = torch.randn(1, 1, 5, 8)
    positions = torch.tensor([[[0, 1, -1, 2, 3]]], dtype=torch.int32)
    filled = [0, 1, 3, 4]
    ranks = KeyDiff().key_priority(keys, positions)[..., filled]
    alone = KeyDiff().key_priority(keys[:, :, filled], positions[..., filled])
    torch.testing.assert_close(ranks, alone)
