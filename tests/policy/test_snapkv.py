"""SnapKV: the published selection, once; then everything stays."""

import pytest
import torch
from oracle import cache_of

from h2okv.policy import get_rule
from h2okv.policy.baselines import SnapKV


def tokens(length, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


@torch.no_grad()
def read(model, cache, *blocks):
    return [model(block, past_key_values=cache).logits for block in blocks]


def voted(query, key, heavy, window, kernel):
    """Return the prompt's positions that stay: the paper's Listing 1 for one KV head in loops."""
    length = query.shape[1]
    votes = [0.0] * (length - window)
    for member in query:
        for i in range(length - window, length):
            shares = torch.softmax(member[i] @ key[: i + 1].T * 16**-0.5, dim=0)
            votes = [v + float(s) for v, s in zip(votes, shares, strict=False)]
    reach = kernel // 2
    pooled = [sum(votes[max(0, p - reach) : p + reach + 1]) / kernel for p in range(len(votes))]
    best = sorted(range(len(votes)), key=lambda p: (pooled[p], p))[-heavy:]
    return set(best) | set(range(length - window, length))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("heavy", "window", "kernel"), [(12, 6, 5), (10, 1, 1), (5, 20, 7)])
def test_the_published_selection(
    make_llama, kept_sets, first_layer, heavy, window, kernel, kv_heads, masks
):
    model, ids = make_llama(layers=1, kv_heads=kv_heads), tokens(70)
    cache = cache_of(model.config, heavy, window, policy=SnapKV(kernel), masks=masks)
    read(model, cache, ids)
    query, key = first_layer(model, ids)
    for head, queries in enumerate(query.unflatten(0, (kv_heads, -1))):
        assert kept_sets(cache)[0][0][head] == voted(queries, key[head], heavy, window, kernel)


@pytest.mark.parametrize("masks", [False, True])
def test_what_follows_the_prompt_stays(make_llama, kept_sets, masks):
    model, ids = make_llama(layers=1), tokens(360)
    cache = cache_of(model.config, 10, 6, policy="snapkv", masks=masks)
    read(model, cache, ids[:, :40])
    prompt = kept_sets(cache)[0][0]
    # Past the room that slots are made with, steps and a turn.
    read(model, cache, *ids[:, 40:340].split(1, dim=1), ids[:, 340:])
    cache.check_integrity()
    assert kept_sets(cache)[0][0] == [positions | set(range(40, 360)) for positions in prompt]
    assert cache.num_cached_tokens == 16 + 320


def test_a_prompt_within_the_budget_stays_whole(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 30, 20, policy="snapkv")
    read(model, cache, tokens(40), *tokens(5).split(1, dim=1))
    cache.check_integrity()
    assert cache.num_cached_tokens == 45


def test_neighbours_are_positions_wherever_they_lie():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(1, 1, 12, generator=generator)
    positions = torch.arange(12, dtype=torch.int32).view(1, 1, -1)
    newest, policy = torch.tensor([[[11]]]), get_rule("snapkv")
    in_order = policy.priority(scores, positions, newest, 0)
    shuffle = torch.randperm(12, generator=generator)
    anywhere = policy.priority(scores[..., shuffle], positions[..., shuffle], newest, 0)
    torch.testing.assert_close(anywhere, in_order[..., shuffle])
    assert float(in_order[0, 0, 0]) == pytest.approx(float(scores[0, 0, :3].sum()) / 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evict_every": 16}, "needs it as one block; leave out evict_every=16"),
        ({"positions": "rolling"}, "keeps every token after the prompt"),
        ({"scoring": "decay"}, "counts the attention of its own window"),
    ],
)
def test_what_it_cannot_do_is_refused(make_llama, options, message):
    with pytest.raises(ValueError, match=message):
        cache_of(make_llama().config, policy="snapkv", **options)


def test_half_a_prompt_is_refused(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 8, 8, policy="snapkv")
    cache.expect(60)
    with pytest.raises(ValueError, match="got 30 of its 60 tokens"):
        read(model, cache, tokens(30))


@pytest.mark.parametrize("kernel", [0, 4, 2.0, True])
def test_kernels_that_make_no_sense(kernel):
    with pytest.raises(ValueError, match="kernel must be an odd int of 1 or more, got"):
        SnapKV(kernel)
