import pytest
import torch
from transformers import DynamicCache

import h2okv
from h2okv_lab.benchmarking.model import Footprint, parse_shape, speedup_limit

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB, LAYERS = 64, 4, 2, 16, 96, 300, 2


def by_hand(tied):
    attention = HIDDEN * HEADS * HEAD * 2 + HIDDEN * KV_HEADS * HEAD * 2
    layer = attention + 3 * HIDDEN * MLP + 2 * HIDDEN
    read = LAYERS * layer + HIDDEN + VOCAB * HIDDEN
    return read + (0 if tied else VOCAB * HIDDEN), read


@pytest.mark.parametrize("tied", [0, 1])
def test_bytes_of_weights_by_hand(tied):
    text = f"hidden=64,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300,tied={tied}"
    footprint = Footprint(parse_shape(text).config(), torch.float32)
    everything, read = by_hand(tied)
    assert footprint.weight_bytes == 4 * everything
    assert footprint.step_weight_bytes == 4 * read


def test_bytes_of_an_entry_by_hand(source):
    config = source.config()
    footprint = Footprint(config, torch.bfloat16)
    entry = LAYERS * KV_HEADS * 2 * HEAD * 2
    assert footprint.full_bytes(1, 1) == entry
    assert footprint.h2o_bytes(1, 1, 1) == entry + LAYERS * KV_HEADS * 8
    rolling = Footprint(config, torch.bfloat16, "rolling")
    assert rolling.h2o_bytes(1, 1, 1) == entry + LAYERS * KV_HEADS * 12
    assert footprint.full_bytes(3, 100) == 3 * 100 * 256
    assert footprint.h2o_bytes(3, 20, 100) == 3 * 20 * (256 + 32)


@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8, 6, 4])
def test_footprint_equals_the_bytes_of_real_caches(build, positions, dtype, bits):
    model = build(dtype)
    footprint = Footprint(model.config, dtype, positions)
    options = {"positions": positions, "kv_bits": bits}
    cache = h2okv.H2OCache(model.config, heavy=0.1, recent=0.1, min_tokens=0, **options)
    ids = torch.randint(300, (3, 100))
    with torch.no_grad(), h2okv.enable(model):
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    assert footprint.h2o_bytes(3, 21, 101, bits) == cache.nbytes
    assert footprint.full_bytes(3, 101) == cache.full_nbytes


def test_windowed_layers_hold_no_more_than_their_window():
    from transformers import Gemma2Config

    config = Gemma2Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, vocab_size=300, sliding_window=32,
    )  # fmt: skip
    footprint = Footprint(config, torch.float32)
    cache = DynamicCache(config=config)
    assert sum(type(layer).__name__ == "DynamicLayer" for layer in cache.layers) == 2
    entry = 2 * 2 * 16 * 4
    assert footprint.full_bytes(1, 100) == 2 * 100 * entry + 2 * 32 * entry


def test_the_limit_by_hand():
    assert speedup_limit(100, 300, 60) == pytest.approx(2.5)
    assert speedup_limit(100, 300, 300) == 1
    # Llama-3-8B in bf16, n = 16384, batch 16, 20 %: (W + B n e) / (W + B K (e + 8 per head)).
    weights, entry, notes = 15_009_849_344, 131_072, 2048
    full, h2o = 16 * 16384 * entry, 16 * 3276 * (entry + notes)
    limit = speedup_limit(weights, full, h2o)
    assert limit == pytest.approx((weights + full) / (weights + h2o))
    footprint = Footprint(parse_shape("llama-3-8b").config(), torch.bfloat16)
    assert footprint.step_weight_bytes == weights
    assert footprint.full_bytes(1, 1) == entry
    assert footprint.h2o_bytes(1, 1, 1) == entry + notes
    assert limit == pytest.approx(2.24, abs=0.01)
