"""KeyDiff: the published ranking in loops, and prompts without scores."""

import pytest
import torch
from oracle import cache_of

import h2okv
from h2okv.policy import Inputs
from h2okv.policy.baselines import KeyDiff


def kept_by_definition(keys, budget):
    """Positions that stay of one KV head's keys ``[T, D]``, as the paper has it."""
    directions = [key / key.norm() for key in keys]
    mean = sum(directions) / len(directions)
    likeness = [float(torch.dot(direction, mean) / mean.norm()) for direction in directions]
    return set(sorted(range(len(keys)), key=likeness.__getitem__)[:budget])


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_published_ranking(make_llama, kept_sets, first_layer, kv_heads, masks):
    model = make_llama(layers=1, kv_heads=kv_heads)
    input_ids = torch.randint(2, 97, (1, 30), generator=torch.Generator().manual_seed(3))
    cache = cache_of(model.config, 11, 0, policy="keydiff", masks=masks)
    h2okv.prefill(model, input_ids, cache)
    _, keys = first_layer(model, input_ids)
    assert kept_sets(cache)[0][0] == [kept_by_definition(head_keys, 11) for head_keys in keys]


@torch.no_grad()
def test_each_step_evicts_what_is_most_like_the_rest(make_llama, kept_sets, first_layer):
    model = make_llama(layers=1, kv_heads=2)
    input_ids = torch.randint(2, 97, (1, 30), generator=torch.Generator().manual_seed(4))
    cache = cache_of(model.config, 8, 0, policy="keydiff")
    h2okv.prefill(model, input_ids[:, :20], cache)
    for token in input_ids[:, 20:].split(1, dim=1):
        model(token, past_key_values=cache)
    _, keys = first_layer(model, input_ids)
    for head, head_keys in enumerate(keys):
        positions = sorted(kept_by_definition(head_keys[:20], 8))
        for new in range(20, 30):
            positions.append(new)
            positions = sorted(
                positions[index] for index in kept_by_definition(head_keys[positions], 8)
            )
        assert kept_sets(cache)[0][0][head] == set(positions)


@pytest.mark.parametrize("options", [{"kv_bits": 8}, {"sink": 2}])
def test_dropping_equals_masking_whatever_is_stored(make_llama, kept_sets, options):
    model, results = make_llama(), []
    input_ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    for masks in (False, True):
        cache = cache_of(
            model.config, 8, 4, policy="keydiff", masks=masks, evict_every=16, **options
        )
        with h2okv.enable(model):
            output = model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), past_key_values=cache,
                max_new_tokens=12, do_sample=False,
            )  # fmt: skip
        results.append((output.tolist(), kept_sets(cache)))
    assert results[0] == results[1]


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
