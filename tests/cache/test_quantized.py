"""Slots in 8, 6 and 4 bits: rounded once and nowhere else, and otherwise as slots in full."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from oracle import cache_of
from reading import (
    BATCHES,
    BUDGETS,
    held_scores,
    run,
    same_alone,
    same_as_masking,
    tokens,
)
from test_oracle import POLICIES, fitting
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.cache.checkpoint import read_head
from h2okv.config import KV_BITS
from h2okv.ops.quant import pack, unpack

# One layer: its keys do not depend on attention, whose last bits would move a number to another
# code now and then.


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(
    bits=st.sampled_from(list(KV_BITS)), policy=st.sampled_from(POLICIES),
    scoring=st.sampled_from(["sum", "value_norm", "expected"]), kv_heads=st.sampled_from([1, 2, 4]),
    budget=BUDGETS, sink=st.integers(0, 3), positions=st.sampled_from(["original", "rolling"]),
    chunk=st.sampled_from([None, 1, 5, 16]), batch=st.fixed_dictionaries(BATCHES),
)  # fmt: skip
def test_dropping_equals_masking(
    make_llama, kept_sets, bits, policy, scoring, kv_heads, budget, sink, positions, chunk, batch
):
    positions, chunk = fitting(policy, positions, chunk)
    model = make_llama(kv_heads=kv_heads, layers=1, seed=batch["seed"])
    make_cache = partial(
        cache_of, model.config, *budget, sink, policy=policy, positions=positions,
        scoring=scoring if policy == "h2o" else "sum", evict_every=chunk, kv_bits=bits,
        seed=batch["seed"] if policy == "random" else 0,
    )  # fmt: skip
    same_as_masking(kept_sets, model, make_cache, **batch)


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(
    bits=st.sampled_from(list(KV_BITS)),
    pads=st.lists(st.integers(0, 20), min_size=2, max_size=3),
    fraction=st.booleans(),
    holes=st.sampled_from([0.0, 0.3]),
    positions=st.sampled_from(["original", "rolling"]),
    seed=st.integers(0, 10**6),
)
def test_padded_row_equals_the_row_alone(
    make_llama, kept_sets, bits, pads, fraction, holes, positions, seed
):
    model, budget = make_llama(layers=1, seed=seed), (0.2, 0.2) if fraction else (4, 5)
    make_cache = partial(cache_of, model.config, *budget, kv_bits=bits, positions=positions)
    same_alone(kept_sets, model, make_cache, pads, [30, 1, 1, 1, 5, 1, 1], holes, seed)


def read(model, ids, blocks, **options):
    cache = cache_of(model.config, **{"heavy": 6, "recent": 6} | options)
    return cache, run(model, cache, ids, blocks)


@pytest.mark.parametrize("bits", KV_BITS)
def test_a_prompt_is_read_in_full_precision_and_kept_rounded(make_llama, kept_sets, bits):
    model, ids = make_llama(), tokens(1, 2, 40)
    (packed, logits), (plain, expected) = (read(model, ids, [40], kv_bits=n) for n in (bits, None))
    assert torch.equal(logits, expected) and kept_sets(packed) == kept_sets(plain)
    for layer, other in zip(packed.layers, plain.layers, strict=True):
        stored, full_states = (layer.state.keys, layer.state.values), (other.keys, other.values)
        for codes, full, size in zip(stored, full_states, KV_BITS[bits], strict=True):
            assert torch.equal(unpack(codes), unpack(pack(full, size)).to(full.dtype))


def codes_by_position(cache):
    """Return the bytes of all entries, by layer, row, head and position."""
    codes = {}
    for index, layer in enumerate(cache.layers):
        tensors = list(layer.state.entry_tensors().values())
        for row, heads in enumerate(layer.state.positions.tolist()):
            for head, slots in enumerate(heads):
                for slot, position in enumerate(slots):
                    if position >= 0:
                        entry = torch.cat([p[row, head, slot].float() for p in tensors])
                        codes[index, row, head, position] = entry
    return codes


RULES = [
    {"scoring": "value_norm"},
    {"scoring": "expected"},
    {"scoring": "expected", "sink": 4},
    {"policy": "keydiff"},
]


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_rules_that_look_at_values_or_keys_see_them_rounded(
    make_llama, kept_sets, bits, options, chunk
):
    ids = tokens(2, 1, 44)
    for seed in range(2):
        model, results = make_llama(layers=1, seed=seed), []
        for masks in (False, True):
            cache, _ = read(
                model, ids, [40, 1, 3], masks=masks, kv_bits=bits, evict_every=chunk,
                **options,
            )  # fmt: skip
            results.append((kept_sets(cache), held_scores(cache, 0, 0)))
        assert results[0][0] == results[1][0]
        torch.testing.assert_close(results[0][1], results[1][1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", KV_BITS)
def test_the_first_eviction_ranks_by_rounded_values(make_llama, bits):
    """The rule once more, from the model's own values: the highest of attention times norm stay."""
    model, ids = make_llama(layers=1).double(), tokens(3, 1, 40)
    attention = model.model.layers[0].self_attn
    full, _ = read(model, ids, [40], policy="full")
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    values = attention.v_proj(hidden).view(40, 2, 16).transpose(0, 1)
    norms = unpack(pack(values.detach(), KV_BITS[bits][1])).abs().sum(dim=-1)
    cache, _ = read(model, ids, [40], heavy=12, recent=1, scoring="value_norm", kv_bits=bits)
    for head, received in enumerate(held_scores(full, 0, 0)):
        best = (received * norms[head])[:39].topk(12).indices
        positions = {p for p in cache.kept_positions(0)[0, head].tolist() if p >= 0}
        assert positions == {*best.tolist(), 39}


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("options", [{}, *RULES, {"positions": "rolling"}], ids=str)
@pytest.mark.parametrize("masks", [False, True])
def test_a_single_token_of_a_padded_block_is_what_it_is_alone(
    make_llama, kept_sets, bits, options, masks
):
    model, ids = make_llama(layers=1).double(), tokens(4, 2, 26)
    options = options | {"masks": masks, "kv_bits": bits}
    blocks = [20, 3, 3]
    mask = torch.ones_like(ids)
    mask[1, 20:22] = mask[1, 23] = mask[1, 25] = 0
    together = cache_of(model.config, 6, 3, **options)
    logits = run(model, together, ids, blocks, mask)
    real = mask[1].bool()
    alone, expected = read(model, ids[1:, real], [20, 1, 1], heavy=6, recent=3, **options)
    torch.testing.assert_close(logits[1, real], expected[0], atol=1e-5, rtol=1e-5)
    assert kept_sets(together)[0][1] == kept_sets(alone)[0][0]


@pytest.mark.parametrize("bits", KV_BITS)
def test_a_pinned_prompt_in_single_tokens_is_rounded_alike(make_llama, kept_sets, bits):
    model, ids, results = make_llama(layers=1).double(), tokens(5, 1, 30), []
    for masks in (False, True):
        cache = cache_of(model.config, 8, 4, kv_bits=bits, masks=masks, evict_every=1)
        cache.pin([(3, 9)])
        logits = run(model, cache, ids, [30])
        results.append((kept_sets(cache), logits))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("positions", ["original", "rolling"])
@torch.no_grad()
def test_what_is_packed_is_never_packed_again(make_llama, bits, positions):
    model, ids = make_llama(), tokens(1, 2, 60)
    cache, _ = read(model, ids, [40], kv_bits=bits, positions=positions)
    survived = 0
    for chunk in ids[:, 40:].split([1, 8, 1, 3, 7], dim=1):
        before = codes_by_position(cache)
        model(chunk, past_key_values=cache)
        after = codes_by_position(cache)
        survived += len(before.keys() & after.keys())
        assert all(torch.equal(before[e], after[e]) for e in before.keys() & after.keys())
    assert survived > 50


@pytest.mark.parametrize("bits", KV_BITS)
def test_keys_of_any_size_are_kept(make_llama, bits):
    model, ids = make_llama(layers=1), tokens(1, 1, 40)
    model.model.layers[0].self_attn.k_proj.weight.data *= 1e5
    (_, dropped), (_, masked) = (
        read(model, ids, [20, *[1] * 20], kv_bits=bits, masks=masks) for masks in (False, True)
    )
    assert dropped.isfinite().all()
    torch.testing.assert_close(dropped, masked, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.1105), (6, 0.0853), (4, 0.06)])
def test_bytes_at_a_head_of_128(make_llama, bits, share):
    model = make_llama(head_dim=128).bfloat16()
    cache, _ = read(
        model, tokens(1, 1, 500), [500], heavy=0.1, recent=0.1, min_tokens=0, kv_bits=bits
    )
    assert cache.full_nbytes == 500 * 2 * 2 * 2 * 128 * 2
    # 20 % of the entries, one free slot, and for each a score and a position.
    codes = sum({8: 136, 4: 72}[each] for each in KV_BITS[bits])
    assert cache.nbytes == 101 * 2 * 2 * (codes + 8)
    assert cache.nbytes / cache.full_nbytes == pytest.approx(share, rel=0.01)
    simulated, _ = read(
        model, tokens(1, 1, 500), [500], heavy=0.1, recent=0.1, kv_bits=bits, masks=True
    )
    assert simulated.nbytes == cache.nbytes // 101 * 100


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_file_and_a_fork_go_on_alike(make_llama, tmp_path, bits, positions, dtype):
    model, ids = make_llama().to(dtype), tokens(1, 2, 60)
    cache, _ = read(model, ids, [40, 1], kv_bits=bits, positions=positions)
    cache.save(tmp_path / "cache")
    others = [
        h2okv.H2OCache.load(tmp_path / "cache", model),
        h2okv.H2OCache.load(tmp_path / "cache"),
        cache.fork(1),
        copy.deepcopy(cache),
    ]
    twice = cache.fork(2)
    chunks = ids[:, 41:].split([1, 9, 1, 8], dim=1)
    expected = [model(chunk, past_key_values=cache).logits for chunk in chunks]
    for other in others:
        assert other.kv_bits == bits and other.nbytes == cache.nbytes
        assert other.layers[0].dtype == dtype
        for chunk, logits in zip(chunks, expected, strict=True):
            assert torch.equal(model(chunk, past_key_values=other).logits, logits)
    twice.reorder_cache(torch.tensor([2, 2, 0, 1]))
    twice.batch_select_indices(torch.tensor([1, 2]))
    step = model(ids[[1, 0]][:, 41:42], past_key_values=twice).logits
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(step, expected[0][[1, 0]], atol=tolerance, rtol=tolerance)


def test_a_file_without_bits_is_as_before(make_llama, tmp_path):
    cache, _ = read(make_llama(), tokens(1, 1, 40), [40])
    cache.save(tmp_path / "cache")
    assert read_head(tmp_path / "cache")["cache_config"]["kv_bits"] is None
    assert h2okv.H2OCache.load(tmp_path / "cache").kv_bits is None


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"do_sample": False}],
    ids=lambda options: next(iter(options)),
)
def test_generate_writes_what_masking_writes(make_llama, bits, options):
    model, ids, texts = make_llama(layers=1), tokens(1, 2, 30), []
    for masks in (False, True):
        torch.manual_seed(0)
        cache = cache_of(model.config, 6, 6, kv_bits=bits, masks=masks)
        with h2okv.enable(model):
            texts.append(model.generate(ids, past_key_values=cache, max_new_tokens=12, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("bits", KV_BITS)
def test_a_full_cache_grows(make_llama, bits):
    model, ids = make_llama(layers=1), tokens(1, 1, 300)
    blocks = [20, *[1] * 280]
    (dropped, logits), (_, expected) = (
        read(model, ids, blocks, policy="full", kv_bits=bits, masks=masks)
        for masks in (False, True)
    )
    assert dropped.num_cached_tokens == 300
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("wrong", [0, 2, 16, True, 8.0, "8"])
@pytest.mark.parametrize("masks", [False, True])
def test_other_bits_are_refused(make_llama, wrong, masks):
    with pytest.raises(ValueError, match=f"kv_bits must be 8, 6 or 4, got {wrong!r}"):
        cache_of(make_llama().config, kv_bits=wrong, masks=masks)


@pytest.mark.parametrize(
    ("bits", "mean", "maximum"), [(8, 1e-4, 1e-3), (6, 4e-3, 3e-2), (4, 2e-2, 1e-1)]
)
@torch.no_grad()
def test_a_trained_model_says_nearly_the_same(bits, mean, maximum):
    """The divergence of next-token distributions, in nats, over 60 steps of a novel."""
    path = bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="h2o", dtype=torch.float32
    )
    text = sample_prompt()[:2000]
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[:, :360]
    assert ids.shape[1] == 360
    packed, full = (
        read(model, ids, [300, *[1] * 60], heavy=32, recent=32, kv_bits=n)[1][0, 300:].log_softmax(
            dim=-1
        )
        for n in (bits, None)
    )
    divergence = (full.exp() * (full - packed)).sum(dim=-1)
    assert divergence.mean() < mean and divergence.max() < maximum
    assert divergence.max() > 0


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "h2o"])
@pytest.mark.parametrize("kv_bits", [8, 6, 4])
@pytest.mark.parametrize("masks", [False, True])
def test_with_evict_every_a_text_is_rounded_alike_in_any_blocks(make_llama, policy, kv_bits, masks):
    model = make_llama().double()
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    logits, keys = [], []
    for blocks in ([40], [7, 1, 20, 12], [1] * 40):
        options = {"kv_bits": kv_bits, "evict_every": 8, "masks": masks}
        cache = cache_of(model.config, 8, 4, policy=policy, **options)
        read = [model(block, past_key_values=cache).logits for block in ids.split(blocks, dim=1)]
        logits.append(torch.cat(read, dim=1))
        keys.append(cache.kept_positions(1).sort(dim=-1).values[..., -12:])
    for other_logits, other_keys in zip(logits[1:], keys[1:], strict=True):
        torch.testing.assert_close(other_logits, logits[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(other_keys, keys[0])
