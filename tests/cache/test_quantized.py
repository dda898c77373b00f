"""Slots in 8, 6 and 4 bits: rounded once and nowhere else, and otherwise as slots in full."""

import copy

import pytest
import torch
from oracle import cache_of
from reading import (
    run,
    tokens,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.cache.checkpoint import read_head
from h2okv.config import KV_BITS
from h2okv.ops.quant import pack, unpack

# One layer: its keys do not depend on attention, whose last bits would move a number to another
# code now and then.


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
