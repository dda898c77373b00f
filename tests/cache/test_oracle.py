"""Real dropping against the masking oracle, over random models, budgets, paddings and blocks."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from oracle import cache_of
from reading import BATCHES, BUDGETS, padding, run, same_alone, same_as_masking, tokens
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import h2okv

POLICIES = h2okv.policy_names()


def fitting(policy, positions, chunk):
    """Return the options that a policy takes: not all can roll."""
    if policy == "snapkv":
        chunk = None
    return ("original" if policy in ("full", "snapkv", "keydiff") else positions), chunk


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES), kv_heads=st.sampled_from([1, 2, 4]), budget=BUDGETS,
    sink=st.integers(0, 3), positions=st.sampled_from(["original", "rolling"]),
    chunk=st.sampled_from([None, 1, 5, 16]), batch=st.fixed_dictionaries(BATCHES),
)  # fmt: skip
def test_dropping_equals_masking(
    make_llama, kept_sets, policy, kv_heads, budget, sink, positions, chunk, batch
):
    positions, chunk = fitting(policy, positions, chunk)
    model = make_llama(kv_heads=kv_heads, seed=batch["seed"])
    make_cache = partial(
        cache_of, model.config, *budget, sink, policy=policy, positions=positions,
        evict_every=chunk, seed=batch["seed"] if policy == "random" else 0,
    )  # fmt: skip
    same_as_masking(kept_sets, model, make_cache, **batch)


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


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    pads=st.lists(st.integers(0, 20), min_size=2, max_size=4),
    fraction=st.booleans(),
    holes=st.sampled_from([0.0, 0.3]),
    positions=st.sampled_from(["original", "rolling"]),
    chunk=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 10**6),
)
def test_padded_row_equals_the_row_alone(
    make_llama, kept_sets, policy, pads, fraction, holes, positions, chunk, seed
):
    positions, chunk = fitting(policy, positions, chunk)
    model, budget = make_llama(seed=seed), (0.2, 0.2) if fraction else (4, 5)
    make_cache = partial(
        cache_of, model.config, *budget, policy=policy, positions=positions, evict_every=chunk
    )
    same_alone(kept_sets, model, make_cache, pads, [30, 1, 1, 1, 5, 1, 1], holes, seed)


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


@pytest.mark.parametrize(("blocks", "chunk"), [([1] * 30, None), ([30], 1), ([12, 18], 1)])
def test_token_by_token_is_algorithm_1(make_llama, kept_sets, blocks, chunk):
    """The paper's Algorithm 1, written down once more in plain Python for one layer."""
    model = make_llama(layers=1, kv_heads=4)
    input_ids = tokens(7, 1, 30)
    cache = cache_of(model.config, heavy=3, recent=4, evict_every=chunk)
    attention = model.model.layers[0].self_attn
    run(model, cache, input_ids, blocks)
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(input_ids))
        cos, sin = model.model.rotary_emb(hidden, torch.arange(30)[None])
        shape = (1, 30, 4, 16)
        query, key = apply_rotary_pos_emb(
            attention.q_proj(hidden).view(shape).transpose(1, 2),
            attention.k_proj(hidden).view(shape).transpose(1, 2),
            cos,
            sin,
        )
    for head in range(4):
        stored: list[int] = []
        scores = dict.fromkeys(range(30), 0.0)
        for token in range(30):
            stored.append(token)
            logits = (query[0, head, token] @ key[0, head, stored].T) * 16**-0.5
            for position, received in zip(stored, torch.softmax(logits, -1).tolist(), strict=True):
                scores[position] += received
            if len(stored) > 7:
                candidates = [p for p in stored if p <= token - 4]
                stored.remove(min(candidates, key=lambda p: (scores[p], p)))
        assert set(stored) == kept_sets(cache)[0][0][head]


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


def test_evicted_entries_never_return(make_llama, kept_sets):
    model = make_llama()
    input_ids = tokens(5, 1, 60)
    cache = cache_of(model.config, heavy=5, recent=5)
    previous = None
    with torch.no_grad():
        for chunk in [input_ids[:, :20], *input_ids[:, 20:].split(1, dim=1)]:
            model(chunk, past_key_values=cache)
            remaining, newest = kept_sets(cache), cache.num_seen_tokens - 1
            if previous is not None:
                for now, before in zip(remaining, previous, strict=True):
                    for head_now, head_before in zip(now[0], before[0], strict=True):
                        assert head_now <= head_before | {newest}
                        assert len(head_now) == 10
            previous = remaining
