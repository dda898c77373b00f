"""Turn after turn on one cache, with nothing but the new tokens."""

import pytest
import torch

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.ops import dispatch

NEW = 7
OPTIONS = {"max_new_tokens": NEW, "do_sample": False}


def turn(seed, length=9, batch=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_turn_is_only_its_own_tokens(make_llama, kept_sets, monkeypatch, positions, chunk):
    widest = []
    plain = dispatch.blockwise_attention_with_scores

    def spy(query, key, *args):
        widest.append((key.shape[2], query.shape[2]))
        return plain(query, key, *args)

    monkeypatch.setattr(dispatch, "blockwise_attention_with_scores", spy)
    model, span = make_llama(), chunk or 1
    options = {"heavy": 5, "recent": 6, "positions": positions, "evict_every": chunk}
    cache, full = h2okv.H2OCache(model.config, **options), h2okv.H2OCache(model.config, **options)
    text, unread = torch.empty(2, 0, dtype=torch.long), torch.empty(2, 0, dtype=torch.long)
    for seed in range(12):
        text = torch.cat([text, turn(seed)], dim=1)
        # The whole text to one cache, the new tokens to the other.
        mask = torch.ones_like(text)
        expected = model.generate(text, attention_mask=mask, past_key_values=full, **OPTIONS)
        new = torch.cat([unread, turn(seed)], dim=1)
        output = model.generate(**cache.next_turn(new), past_key_values=cache, **OPTIONS)
        assert torch.equal(output[:, new.shape[1] :], expected[:, text.shape[1] :])
        assert kept_sets(cache) == kept_sets(full)
        text, unread = expected, expected[:, -1:]
        cache.check_integrity()
        assert cache.num_seen_tokens == text.shape[1] - 1
        assert cache.num_cached_tokens < 11 + span
        assert cache.layers[0].keys.shape[2] == 11 + span
    assert all(keys <= 11 + span + queries for keys, queries in widest)
    assert max(queries for _, queries in widest) <= (chunk or 10)


def test_a_turn_without_its_mask_names_the_remedy(make_llama):
    model = make_llama()
    cache = h2okv.H2OCache(model.config, heavy=5, recent=6)
    model.generate(**cache.next_turn(turn(0)), past_key_values=cache, **OPTIONS)
    with pytest.raises(ValueError, match=rf"next_turn\(input_ids\), {CACHE}=cache\)"):
        model.generate(turn(1, 12), past_key_values=cache, **OPTIONS)
