"""Real dropping against the masking oracle, over random models, budgets, paddings and blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from oracle import cache_of
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import h2okv

POLICIES = h2okv.policy_names()


def fitting(policy, positions, chunk):
    """Return the options that a policy takes: not all can roll."""
    if policy == "snapkv":
        chunk = None
    return ("original" if policy in ("full", "snapkv", "keydiff") else positions), chunk


def run(model, cache, input_ids, mask, blocks):
    """Feeds the tokens in blocks; returns the logits of all, ``[B, T, V]``."""
    logits, at = [], 0
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        for size in blocks:
            block = slice(at, at + size)
            out = model(
                input_ids[:, block],
                attention_mask=mask[:, : at + size],
                position_ids=position_ids[:, block],
                past_key_values=cache,
            )
            logits.append(out.logits)
            at += size
    return torch.cat(logits, dim=1)


def held_scores(cache, layer, row):
    """Scores of what a row holds, by head and ascending position, ``[H, entries]``."""
    positions, scores = cache.kept_positions(layer)[row], cache.scores(layer)[row]
    return torch.stack(
        [s[p.argsort()][(p.sort().values >= 0)] for p, s in zip(positions, scores, strict=True)]
    )


def tokens(seed, batch, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


def padding(pads, blocks, holes=0.0, seed=0):
    """Left padding of the prompt, and holes anywhere in the later blocks."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(len(pads), sum(blocks), generator=generator) >= holes).long()
    mask[:, : blocks[0]] = 1
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


budgets = st.one_of(
    st.tuples(st.integers(0, 12), st.integers(1, 12)),
    st.tuples(st.floats(0.05, 0.5), st.floats(0.05, 0.5)),
)


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    kv_heads=st.sampled_from([1, 2, 4]),
    budget=budgets,
    sink=st.integers(0, 3),
    pads=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    blocks=st.lists(st.sampled_from([1, 1, 1, 2, 7, 16]), max_size=8),
    prompt=st.integers(10, 40),
    holes=st.sampled_from([0.0, 0.0, 0.3]),
    positions=st.sampled_from(["original", "rolling"]),
    chunk=st.sampled_from([None, 1, 5, 16]),
    seed=st.integers(0, 10**6),
)
def test_dropping_equals_masking(
    make_llama,
    kept_sets,
    policy,
    kv_heads,
    budget,
    sink,
    pads,
    blocks,
    prompt,
    holes,
    positions,
    chunk,
    seed,
):
    positions, chunk = fitting(policy, positions, chunk)
    model = make_llama(kv_heads=kv_heads, seed=seed)
    blocks = [prompt, *blocks, 1]
    mask = padding(pads, blocks, holes, seed)
    input_ids = tokens(seed, len(pads), sum(blocks))
    heavy, recent = budget
    results = []
    for masks in (False, True):
        cache = cache_of(
            model.config,
            heavy,
            recent,
            sink,
            policy=policy,
            positions=positions,
            evict_every=chunk,
            masks=masks,
            seed=seed if policy == "random" else 0,
        )
        logits = run(model, cache, input_ids, mask, blocks)
        cache.check_integrity()
        scores = [held_scores(cache, 1, row) for row in range(len(pads))]
        results.append((logits[mask.bool()], kept_sets(cache), scores))
    (dropped, remaining, received), (masked, alive, expected) = results
    assert remaining == alive
    torch.testing.assert_close(received, expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(dropped, masked, atol=2e-4, rtol=1e-4)


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
    options = {"policy": policy, "positions": positions, "evict_every": chunk}
    model = make_llama(seed=seed)
    blocks = [30, 1, 1, 1, 5, 1, 1]
    heavy, recent = (0.2, 0.2) if fraction else (4, 5)
    mask = padding(pads, blocks, holes, seed)
    input_ids = tokens(seed, len(pads), sum(blocks))
    together = cache_of(model.config, heavy, recent, **options)
    logits = run(model, together, input_ids, mask, blocks)
    for row in range(len(pads)):
        alone = cache_of(model.config, heavy, recent, **options)
        real = mask[row].bool()
        own_blocks = [int(cut.sum()) for cut in real.split(blocks) if cut.any()]
        own_ids = input_ids[row : row + 1, real]
        expected = run(model, alone, own_ids, torch.ones_like(own_ids), own_blocks)
        assert [layer[0] for layer in kept_sets(alone)] == [
            layer[row] for layer in kept_sets(together)
        ]
        torch.testing.assert_close(
            held_scores(together, 1, row), held_scores(alone, 1, 0), atol=1e-3, rtol=1e-4
        )
        torch.testing.assert_close(logits[row, real], expected[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("masks", [False, True])
def test_budget_of_the_whole_length_is_full_attention(make_llama, policy, masks):
    model, reference = make_llama(), make_llama(attention="sdpa")
    input_ids = tokens(3, 2, 40)
    blocks = [25, 1, 1, 8, 1, 4]
    mask = padding([0, 6], blocks)
    cache = cache_of(model.config, heavy=20, recent=20, policy=policy, masks=masks)
    expected = run(reference, DynamicCache(), input_ids, mask, blocks)
    actual = run(model, cache, input_ids, mask, blocks)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("blocks", "chunk"), [([1] * 30, None), ([30], 1), ([12, 18], 1)])
def test_token_by_token_is_algorithm_1(make_llama, kept_sets, blocks, chunk):
    """The paper's Algorithm 1, written down once more in plain Python for one layer."""
    model = make_llama(layers=1, kv_heads=4)
    input_ids = tokens(7, 1, 30)
    cache = cache_of(model.config, heavy=3, recent=4, evict_every=chunk)
    attention = model.model.layers[0].self_attn
    run(model, cache, input_ids, torch.ones_like(input_ids), blocks)
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
        run(model, cache, input_ids, torch.ones_like(input_ids), blocks)
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
