"""Real dropping against the masking oracle, over random models, budgets, paddings and blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import h2okv

POLICIES = h2okv.policy_names()


def run(model, cache, input_ids, mask, blocks):
    """Feeds the tokens in blocks; returns the logits of all, ``[B, T, V]``."""
    logits, at = [], 0
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        for size in blocks:
            part = slice(at, at + size)
            out = model(
                input_ids[:, part],
                attention_mask=mask[:, : at + size],
                position_ids=position_ids[:, part],
                past_key_values=cache,
            )
            logits.append(out.logits)
            at += size
    return torch.cat(logits, dim=1)


def tokens(seed, batch, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


def left_padding(pads, length):
    mask = torch.ones(len(pads), length, dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


budgets = st.one_of(
    st.tuples(st.integers(0, 12), st.integers(1, 12)),
    st.tuples(st.floats(0.05, 0.5), st.floats(0.05, 0.5)),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    kv_heads=st.sampled_from([1, 2, 4]),
    budget=budgets,
    sink=st.integers(0, 3),
    pads=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    blocks=st.lists(st.sampled_from([1, 1, 1, 2, 7, 16]), max_size=8),
    prompt=st.integers(10, 40),
    seed=st.integers(0, 10**6),
)
def test_dropping_equals_masking(
    make_llama, kept_sets, policy, kv_heads, budget, sink, pads, blocks, prompt, seed
):
    model = make_llama(kv_heads=kv_heads, seed=seed)
    blocks = [prompt, *blocks, 1]
    mask = left_padding(pads, sum(blocks))
    input_ids = tokens(seed, len(pads), sum(blocks))
    heavy, recent = budget
    results = []
    for simulate in (False, True):
        cache = h2okv.H2OCache(
            model.config, heavy, recent, sink, policy=policy, simulate=simulate, seed=seed
        )
        logits = run(model, cache, input_ids, mask, blocks)
        cache.check_integrity()
        results.append((logits[mask.bool()], kept_sets(cache)))
    (dropped, kept), (masked, alive) = results
    assert kept == alive
    torch.testing.assert_close(dropped, masked, atol=2e-4, rtol=1e-4)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    pads=st.lists(st.integers(0, 20), min_size=2, max_size=4),
    fraction=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_padded_row_equals_the_row_alone(make_llama, kept_sets, policy, pads, fraction, seed):
    model = make_llama(seed=seed)
    blocks = [30, 1, 1, 1, 5, 1, 1]
    heavy, recent = (0.2, 0.2) if fraction else (4, 5)
    mask, input_ids = left_padding(pads, sum(blocks)), tokens(seed, len(pads), sum(blocks))
    together = h2okv.H2OCache(model.config, heavy, recent, policy=policy)
    logits = run(model, together, input_ids, mask, blocks)
    for row, pad in enumerate(pads):
        alone = h2okv.H2OCache(model.config, heavy, recent, policy=policy)
        own_mask = mask[row : row + 1, pad:]
        expected = run(
            model, alone, input_ids[row : row + 1, pad:], own_mask, [30 - pad, *blocks[1:]]
        )
        assert [layer[0] for layer in kept_sets(alone)] == [
            layer[row] for layer in kept_sets(together)
        ]
        torch.testing.assert_close(logits[row, pad:], expected[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("simulate", [False, True])
def test_budget_of_the_whole_length_is_full_attention(make_llama, policy, simulate):
    model, reference = make_llama(), make_llama(attention="eager")
    input_ids = tokens(3, 2, 40)
    mask = left_padding([0, 6], 40)
    blocks = [25, 1, 1, 8, 1, 4]
    cache = h2okv.H2OCache(model.config, heavy=20, recent=20, policy=policy, simulate=simulate)
    expected = run(reference, DynamicCache(), input_ids, mask, blocks)
    actual = run(model, cache, input_ids, mask, blocks)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


def test_token_by_token_is_algorithm_1(make_llama, kept_sets):
    """The paper's Algorithm 1, written down once more in plain Python for one layer."""
    model = make_llama(layers=1, kv_heads=4)
    input_ids = tokens(7, 1, 30)
    cache = h2okv.H2OCache(model.config, heavy=3, recent=4)
    captured = []
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda _, __, out: captured.append(out))
    run(model, cache, input_ids, torch.ones_like(input_ids), [1] * 30)
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(input_ids))
        cos, sin = model.model.rotary_emb(hidden, torch.arange(30)[None])
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        shape = (1, 30, 4, 16)
        query, key = apply_rotary_pos_emb(
            attention.q_proj(hidden).view(shape).transpose(1, 2),
            attention.k_proj(hidden).view(shape).transpose(1, 2),
            cos,
            sin,
        )
    for head in range(4):
        kept: list[int] = []
        scores = dict.fromkeys(range(30), 0.0)
        for token in range(30):
            kept.append(token)
            logits = (query[0, head, token] @ key[0, head, kept].T) * 16**-0.5
            for position, received in zip(kept, torch.softmax(logits, -1).tolist(), strict=True):
                scores[position] += received
            if len(kept) > 7:
                candidates = [p for p in kept if p <= token - 4]
                kept.remove(min(candidates, key=lambda p: (scores[p], p)))
        assert set(kept) == kept_sets(cache)[0][0][head]


def test_evicted_entries_never_return(make_llama, kept_sets):
    model = make_llama()
    input_ids = tokens(5, 1, 60)
    cache = h2okv.H2OCache(model.config, heavy=5, recent=5)
    previous = None
    with torch.no_grad():
        for part in [input_ids[:, :20], *input_ids[:, 20:].split(1, dim=1)]:
            model(part, past_key_values=cache)
            kept, newest = kept_sets(cache), cache.num_seen_tokens - 1
            if previous is not None:
                for now, before in zip(kept, previous, strict=True):
                    for head_now, head_before in zip(now[0], before[0], strict=True):
                        assert head_now <= head_before | {newest}
                        assert len(head_now) == 10
            previous = kept
