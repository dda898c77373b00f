"""Scores other than the sum: against masking, a row alone, and the definitions in plain Python."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from oracle import cache_of
from reading import BATCHES, held_scores, run, same_alone, same_as_masking, tokens
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import h2okv
from h2okv.config import SCORINGS

DECAYED_NORM = "value_norm with decay"
VARIANTS = [*SCORINGS[1:], DECAYED_NORM]


def options_of(scoring, decay):
    return {"scoring": scoring.split()[0], "decay": decay if "decay" in scoring else None}


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    scoring=st.sampled_from(VARIANTS), decay=st.sampled_from([0.3, 0.9, 0.99, 1.0]),
    policy=st.sampled_from(["h2o", "heavy", "full"]), kv_heads=st.sampled_from([1, 2, 4]),
    sink=st.integers(0, 3), positions=st.sampled_from(["original", "rolling"]),
    chunk=st.sampled_from([None, 1, 5, 16]), fractions=st.booleans(),
    batch=st.fixed_dictionaries(BATCHES),
)  # fmt: skip
def test_dropping_equals_masking(
    make_llama, kept_sets, scoring, decay, policy, kv_heads, sink, positions, chunk, fractions,
    batch,
):  # fmt: skip
    model = make_llama(kv_heads=kv_heads, seed=batch["seed"])
    make_cache = partial(
        cache_of, model.config, *((0.2, 0.15) if fractions else (4, 3)), sink, policy=policy,
        positions="original" if policy == "full" else positions, evict_every=chunk,
        **options_of(scoring, decay),
    )  # fmt: skip
    same_as_masking(kept_sets, model, make_cache, **batch)


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    scoring=st.sampled_from(VARIANTS), pads=st.lists(st.integers(0, 20), min_size=2, max_size=3),
    fraction=st.booleans(), holes=st.sampled_from([0.0, 0.3]), chunk=st.sampled_from([None, 4]),
    masks=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_padded_row_equals_the_row_alone(
    make_llama, kept_sets, scoring, pads, fraction, holes, chunk, masks, seed
):
    model, budget = make_llama(seed=seed), (0.2, 0.2) if fraction else (4, 5)
    options = {**options_of(scoring, 0.8), "evict_every": chunk, "masks": masks}
    make_cache = partial(cache_of, model.config, *budget, **options)
    same_alone(kept_sets, model, make_cache, pads, [30, 1, 1, 5, 1], holes, seed)


def first_layer(model, input_ids, position=None):
    """Return queries ``[HQ, T, D]``, keys and values ``[H, T, D]`` of the first layer."""
    attention, length = model.model.layers[0].self_attn, input_ids.shape[1]
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(input_ids))
        position_ids = torch.arange(length) if position is None else torch.full((length,), position)
        cos, sin = model.model.rotary_emb(hidden, position_ids[None])
        query, key, value = (
            project(hidden).view(1, length, -1, 16).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
    return query[0], key[0], value[0]


def by_definition(scoring, decay, received, norm):
    """Return the score from the list of ``(query, probability)`` that an entry received."""
    last = received[-1][0]
    total = sum(p for _, p in received)
    decayed = sum(p * decay ** (last - query) for query, p in received)
    return {
        "mean": total / len({query for query, _ in received}),
        "decay": decayed,
        "last": sum(p for query, p in received if query == last),
        "value_norm": total * norm,
        "expected": total * norm,
        DECAYED_NORM: decayed * norm,
    }[scoring]


@pytest.mark.parametrize("scoring", VARIANTS)
@pytest.mark.parametrize(("blocks", "chunk"), [([1] * 36, None), ([36], 1), ([16, 20], 1)])
def test_token_by_token_is_algorithm_1_with_other_scores(
    make_llama, kept_sets, scoring, blocks, chunk
):
    """Algorithm 1 in plain Python, with every probability noted and scores from the notes."""
    decay, model = 0.85, make_llama(layers=1, kv_heads=2)
    input_ids = tokens(7, 1, 36)
    query, key, value = first_layer(model, input_ids)
    cache = cache_of(model.config, 3, 4, evict_every=chunk, **options_of(scoring, decay))
    run(model, cache, input_ids, blocks)
    for head in range(2):
        stored: list[int] = []
        received: dict[int, list[tuple[int, float]]] = {token: [] for token in range(36)}
        for token in range(36):
            stored.append(token)
            for member in (2 * head, 2 * head + 1):
                logits = (query[member, token] @ key[head, stored].T) * 16**-0.5
                weights = torch.softmax(logits, -1).tolist()
                for position, weight in zip(stored, weights, strict=True):
                    received[position].append((token, weight))
            scores = {
                p: by_definition(scoring, decay, received[p], float(value[head, p].abs().sum()))
                for p in stored
            }
            if len(stored) > 7:
                candidates = [p for p in stored if p <= token - 4]
                stored.remove(min(candidates, key=lambda p: (scores[p], p)))
        assert set(stored) == kept_sets(cache)[0][0][head]
        expected = torch.tensor([scores[p] for p in sorted(stored)])
        torch.testing.assert_close(held_scores(cache, 0, 0)[head], expected, atol=1e-4, rtol=1e-4)


def reevaluated_norms(model, input_ids, key, position):
    """Return the L2 norms of the attention of a group's heads at one position behind the keys."""
    query = first_layer(model, input_ids, position)[0].unflatten(0, (2, 2))
    shares = (query @ key.unsqueeze(1).transpose(-1, -2) * 16**-0.5).softmax(-1)
    return shares.square().sum(dim=(1, 2)).sqrt()


@pytest.mark.parametrize("scoring", VARIANTS)
def test_a_prompt_in_one_block_by_definition(make_llama, scoring):
    """All scores of a block, from the whole matrix and its definition."""
    length, decay, model = 150, 0.97, make_llama(layers=1, kv_heads=2)
    input_ids = tokens(3, 1, length)
    query, key, value = first_layer(model, input_ids)
    cache = cache_of(model.config, policy="full", **options_of(scoring, decay))
    run(model, cache, input_ids, [length])
    logits = query @ key.repeat_interleave(2, 0).transpose(1, 2) * 16**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    shares = logits.masked_fill(future, -torch.inf).softmax(-1).unflatten(0, (2, 2)).sum(1)
    later = torch.arange(length - 1, -1, -1.0)
    decayed, norms = (shares * (decay**later)[:, None]).sum(1), value.abs().sum(-1)
    expected = {
        "mean": shares.sum(1) / (later + 1),
        "last": shares[:, -1],
        "decay": decayed,
        "value_norm": shares.sum(1) * norms,
        "expected": reevaluated_norms(model, input_ids, key, length - 1 + 16) * norms,
        DECAYED_NORM: decayed * norms,
    }[scoring]
    torch.testing.assert_close(held_scores(cache, 0, 0), expected.float(), atol=1e-4, rtol=1e-4)


def test_decay_of_one_is_the_sum(make_llama, kept_sets):
    model, input_ids = make_llama(), tokens(1, 2, 50)
    caches = [cache_of(model.config, 5, 5, **options) for options in ({}, options_of("decay", 1.0))]
    for cache in caches:
        run(model, cache, input_ids, [30, *[1] * 12, 8])
    assert kept_sets(caches[0]) == kept_sets(caches[1])
    torch.testing.assert_close(caches[0].scores(1), caches[1].scores(1))


def test_a_long_prompt_does_not_overflow(make_llama):
    """Weights far below what fp32 can hold are zero, not NaN."""
    model, input_ids = make_llama(layers=1), tokens(1, 1, 400)
    cache = cache_of(model.config, 5, 5, **options_of("decay", 0.01))
    run(model, cache, input_ids, [380, *[1] * 20])
    cache.check_integrity()
    assert bool(torch.isfinite(cache.scores(0)).all())


@pytest.mark.parametrize("scoring", VARIANTS)
def test_saved_forked_and_selected_rows_go_on(make_llama, kept_sets, tmp_path, scoring):
    model, input_ids = make_llama(), tokens(2, 2, 60)
    options = options_of(scoring, 0.9)
    cache = cache_of(model.config, 5, 5, **options)
    run(model, cache, input_ids[:, :40], [30, *[1] * 10])
    cache.save(tmp_path / "c")
    loaded = h2okv.H2OCache.load(tmp_path / "c", model)
    assert type(loaded.rule.scoring) is type(cache.rule.scoring)
    assert loaded.rule.scoring.decay == cache.rule.scoring.decay
    assert loaded.nbytes == cache.nbytes
    forked = cache.fork(2)
    forked.batch_select_indices(torch.tensor([3, 0]))  # the second row, then the first

    def go_on(cache, ids):
        with torch.no_grad():
            logits = [model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)]
            return torch.cat([*logits, model(ids.flip(1), past_key_values=cache).logits], dim=1)

    expected = go_on(cache, input_ids[:, 40:])
    assert torch.equal(go_on(loaded, input_ids[:, 40:]), expected)
    swapped = go_on(forked, input_ids[[1, 0], 40:])
    torch.testing.assert_close(swapped, expected[[1, 0]], atol=1e-4, rtol=1e-4)
    assert [layer[::-1] for layer in kept_sets(forked)] == kept_sets(cache) == kept_sets(loaded)


@pytest.mark.parametrize("scoring", VARIANTS)
def test_it_changes_what_is_kept(make_llama, kept_sets, scoring):
    model, input_ids = make_llama(), tokens(5, 1, 80)
    sets = []
    for options in ({}, options_of(scoring, 0.5)):
        cache = cache_of(model.config, 8, 4, **options)
        run(model, cache, input_ids, [60, *[1] * 20])
        sets.append(kept_sets(cache))
    assert sets[0] != sets[1]


def test_the_sum_needs_nothing_else(make_llama):
    model, input_ids = make_llama(), tokens(5, 1, 40)
    cache = cache_of(model.config, 5, 5)
    run(model, cache, input_ids, [40])
    layer = cache.layers[0]
    assert layer.rule.is_plain_sum and layer.state.value_weights is None
    assert layer._decayed(layer.state.scores, 1) is layer.state.scores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "means"}, "scoring 'means' is unknown; did you mean mean"),
        ({"scoring": "l2"}, "scoring 'l2' is unknown; choose from sum, mean, decay"),
        ({"scoring": "decay", "decay": 0.0}, "decay must be a factor .* got 0.0"),
        ({"scoring": "decay", "decay": 1.01}, "decay must be a factor .* got 1.01"),
        ({"scoring": "decay", "decay": float("nan")}, "decay must be a factor .* got nan"),
        ({"scoring": "decay", "decay": True}, "decay must be a factor .* got True"),
        ({"decay": 0.9}, "decay=0.9 has no effect with scoring='sum'"),
        ({"scoring": "mean", "decay": 0.9}, "decay=0.9 has no effect with scoring='mean'"),
        ({"scoring": "value_norm", "decay": 2.0}, "decay must be a factor .* got 2.0"),
        ({"scoring": "mean", "policy": "recent"}, "no effect with policy='recent'"),
        ({"scoring": "decay", "policy": "random"}, "no effect with policy='random'"),
    ],
)
def test_what_makes_no_sense_is_refused(make_llama, options, message):
    with pytest.raises(ValueError, match=message):
        cache_of(make_llama().config, **options)
