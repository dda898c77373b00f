import numpy as np
import pytest
import torch
from oracle import cache_of

import h2okv
from h2okv.budget import TokenBudget
from h2okv_lab.analysis.attention_stats import accumulated, dense_losses, of_layers
from h2okv_lab.analysis.eviction_trace import GlobalPolicy, entries_after, follow

BUDGET = TokenBudget(sink=2, heavy=10, recent=8)


@pytest.mark.parametrize(
    "policy",
    ["h2o", *(pytest.param(name, marks=pytest.mark.slow) for name in ("recent", "random"))],
)
def test_trace_equals_the_masked_cache_at_every_step(model, sample, kept_sets, policy):
    trace = follow(model, sample.input_ids, policy, BUDGET, first=30)
    cache = cache_of(model.config, 10, 8, 2, policy=policy, masks=True)
    with h2okv.enable(model), torch.inference_mode():
        block = sample.input_ids[:, :30]
        for step in range(29, sample.length):
            model(block, past_key_values=cache)
            entries = entries_after(trace.gone_at, step)
            for layer, rows in enumerate(kept_sets(cache)):
                for head, positions in enumerate(rows[0]):
                    assert set(np.flatnonzero(entries[layer, head])) == positions
            block = sample.input_ids[:, step + 1 : step + 2]


def test_blocks_evict_as_the_masked_cache_does_and_predict_every_token(model, sample, kept_sets):
    trace = follow(model, sample.input_ids, "h2o", BUDGET, first=30, block=7)
    cache = cache_of(model.config, 10, 8, 2, masks=True)
    begin, losses = 0, []
    with h2okv.enable(model), torch.inference_mode():
        for end in (*range(30, sample.length, 7), sample.length):
            ids = sample.input_ids[:, begin:end]
            logits = model(ids, past_key_values=cache).logits[0].log_softmax(-1)
            true = sample.input_ids[0, begin + 1 : end + 1]
            losses += (-logits[: len(true)].gather(-1, true[:, None])[:, 0]).tolist()
            entries = entries_after(trace.gone_at, end - 1)
            for layer, rows in enumerate(kept_sets(cache)):
                for head, positions in enumerate(rows[0]):
                    assert set(np.flatnonzero(entries[layer, head])) == positions
            # Within a block a query sees all entries from its start.
            assert entries_after(trace.gone_at, end - 2)[..., begin:].all()
            begin = end
    np.testing.assert_allclose(trace.losses[30:], losses[29:], atol=1e-4)


def test_a_first_block_of_the_budgets_size_changes_nothing(model, sample):
    quick = follow(model, sample.input_ids, "h2o", BUDGET)
    slow = follow(model, sample.input_ids, "h2o", BUDGET, first=1)
    assert quick.first == 20
    np.testing.assert_array_equal(quick.gone_at, slow.gone_at)
    np.testing.assert_allclose(quick.losses[20:], slow.losses[20:], atol=1e-4)


def test_a_full_budget_gives_the_dense_losses(model, sample):
    trace = follow(model, sample.input_ids, "h2o", TokenBudget(0, 100, 100), first=5)
    np.testing.assert_allclose(
        trace.losses[5:], dense_losses(model, sample.input_ids)[5:], atol=1e-4
    )
    assert (trace.gone_at == sample.length + 1).all()


@pytest.mark.slow
def test_recorded_scores_and_bytes_equal_the_caches(model, sample):
    trace = follow(model, sample.input_ids, "h2o", BUDGET, first=30, recorded=4)
    assert trace.recorded.tolist() == [29, 72, 116, 159]
    cache = cache_of(model.config, 10, 8, 2)
    with h2okv.enable(model), torch.inference_mode():
        model(sample.input_ids[:, :30], past_key_values=cache)
        for step in range(30, sample.length):
            model(sample.input_ids[:, step : step + 1], past_key_values=cache)
    assert trace.cache_bytes[-1] == cache.nbytes
    assert trace.full_bytes[-1] == cache.full_nbytes
    for layer in range(2):
        positions, scores = cache.kept_positions(layer)[0], cache.scores(layer)[0]
        for head in range(2):
            is_used = positions[head] >= 0
            noted = trace.scores[-1][layer, head][positions[head][is_used]]
            np.testing.assert_allclose(noted, scores[head][is_used], rtol=1e-4)


def test_the_global_policy_keeps_tokens_with_future_attention(model, sample):
    scores = of_layers(model, sample.input_ids, accumulated).sum(axis=2)
    policy = GlobalPolicy(scores, (0, 1))
    trace = follow(model, sample.input_ids, policy, TokenBudget(0, 12, 8))
    entries = entries_after(trace.gone_at, sample.length - 1)
    old = sample.length - 8
    for layer in range(2):
        for head in range(2):
            best = np.argsort(-scores[layer, head, :old])[:12]
            assert set(np.flatnonzero(entries[layer, head, :old])) == set(best)
