import numpy as np
import pytest
import torch

from training import eviction, model, quality, tables
from training.data import fact_window, held_out_windows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def net(tokenizer):
    net = model.build_model(model.build_config(tokenizer, layers=2)).eval()
    net.set_attn_implementation("h2o")
    return net


def test_with_the_full_cache_both_halves_are_dense_attention(net, corpus):
    tokens = quality.stack(held_out_windows(corpus, 2, 64))
    loss, _ = eviction.second_half(net, tokens, eviction.make_cache(net, "full", 64))
    dense, _ = quality.loss_and_hits(net, tokens)
    assert torch.allclose(loss, dense[:, 31:], atol=1e-4)


@pytest.mark.parametrize("policy", eviction.POLICIES)
def test_every_policy_keeps_the_budget(net, corpus, policy):
    tokens = quality.stack(held_out_windows(corpus, 2, 64))
    cache = eviction.make_cache(net, policy, 9)
    eviction.second_half(net, tokens, cache)
    assert cache.num_cached_tokens == 9


def test_recall_counts_answers_stated_in_the_prompt_and_asked_after_it(net, corpus):
    plain = held_out_windows(corpus, 1, 256)
    facts = [fact_window(corpus, 0.2, 256, np.random.default_rng(seed)) for seed in range(3)]
    measured = eviction.measure(net, plain, facts, "h2o", 0.2)
    stated = [
        {a.fact for a in window.answers if a.occurrence == 0 and a.stop <= 128} for window in facts
    ]
    answers = [
        a
        for window, prompt_facts in zip(facts, stated, strict=True)
        for a in window.answers
        if a.start >= 128 and a.fact in prompt_facts
    ]
    assert measured.tokens == 26
    assert measured.answers == len(answers) > 0


def test_heavy_positions_lie_outside_the_recent_window(net, corpus):
    rows = eviction.heavy_positions(net, held_out_windows(corpus, 2, 64), 0.25)
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(row["median_position"] < 60 for row in rows)


def test_tables_as_markdown_and_csv(tmp_path):
    rows = [{"layer": 0, "mean": 0.125, "highest_head": 0.5}]
    lines = tables.markdown(rows, tables.FIRST_POSITION).splitlines()
    assert lines == ["| layer | mean | highest head |", "|---|---|---|", "| 0 | 12.5% | 50.0% |"]
    tables.write_csv(tmp_path / "t.csv", rows)
    assert (tmp_path / "t.csv").read_text() == "layer,mean,highest_head\n0,0.125,0.5\n"
