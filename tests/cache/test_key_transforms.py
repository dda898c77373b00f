"""Transforms of 4-bit keys: exact everywhere, and worth it."""

import warnings

import pytest
import torch
from oracle import cache_of
from reading import run, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.cache.slot_state import EntryStorage
from h2okv.calibration.key_transforms import transforms_of_model
from h2okv.ops.decode import decode_with_scores
from h2okv.ops.quant import KeyTransform, pack
from h2okv.ops.reference import AttentionSpec, attention_with_scores


def with_offsets(model, size=30.0):
    """Give a model's keys a few numbers that are far from zero in every token, as Qwen's are."""
    for layer in model.model.layers:
        projection = layer.self_attn.k_proj
        offsets = torch.zeros(projection.out_features, dtype=projection.weight.dtype)
        offsets[3::8] = size
        projection.bias = torch.nn.Parameter(offsets)
    return model


def some_transform(batch=2, heads=3, size=16):
    scale = torch.rand(batch, heads, 1, size) + 0.1
    return KeyTransform(3 * torch.randn(batch, heads, 1, size), scale)


@pytest.mark.parametrize("size", [1, 6, 16, 24, 45, 64, 80, 128])
def test_a_transform_is_undone_and_products_stay(size):
    transform, keys = some_transform(size=size), torch.randn(2, 3, 5, size) * 4
    changed = transform.apply(keys)
    torch.testing.assert_close(transform.undo(changed), keys, atol=1e-4, rtol=1e-4)
    query = torch.randn(2, 6, 2, size)
    grouped = transform.of_queries(query).unflatten(1, (3, 2))
    products = torch.einsum("bhgtd,bhnd->bhgtn", grouped, changed)
    products += transform.center_logits(query).unflatten(1, (3, 2))
    expected = torch.einsum("bhgtd,bhnd->bhgtn", query.unflatten(1, (3, 2)), keys)
    torch.testing.assert_close(products, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_step_equals_attention_to_the_rounded_keys(softcap, has_sinks, groups):
    transform = some_transform()
    keys, values = torch.randn(2, 3, 9, 16) * 3, torch.randn(2, 3, 9, 16)
    query, hidden = torch.randn(2, 3 * groups, 1, 16), torch.rand(2, 3, 9) < 0.3
    spec = AttentionSpec(0.3, softcap, torch.randn(3 * groups) if has_sinks else None)
    output, sums = decode_with_scores(
        query, pack(transform.apply(keys), 4), pack(values, 4), hidden, spec,
        key_transform=transform,
    )  # fmt: skip
    storage = EntryStorage(4)
    visible = ~hidden.unsqueeze(2)
    expected, weights = attention_with_scores(
        query, storage.round(keys, transform), storage.round(values), visible, spec,
    )  # fmt: skip
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sums, weights, atol=1e-4, rtol=1e-4)


def test_a_model_is_measured_once_for_its_weights(make_llama, monkeypatch):
    model = make_llama()
    first = transforms_of_model(model)
    assert transforms_of_model(model) is first and sorted(first) == [0, 1]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    second = transforms_of_model(model)
    assert not torch.equal(first[0].center, second[0].center)
    torch.testing.assert_close(second[0].center, 2 * first[0].center, atol=1e-4, rtol=1e-4)


def test_only_keys_of_4_bits_are_transformed(make_llama):
    model, ids = make_llama(), tokens(1, 1, 20)
    for source, options in (
        (model.config, {"kv_bits": 4}), (model, {"kv_bits": 6}), (model, {"kv_bits": 8}),
        (model, {}),
    ):  # fmt: skip
        cache = cache_of(source, 4, 4, **options)
        run(model, cache, ids, [20])
        assert cache.layers[0].state.key_transform is None


def test_a_config_alone_warns_once_it_reads(make_llama):
    model, ids = make_llama(), tokens(1, 1, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        caches = [cache_of(model.config, 8, 8, kv_bits=4), cache_of(model, 8, 8, kv_bits=4)]
        assert not caught
        for cache in caches:
            run(model, cache, ids, [10, 10])
    messages = [str(w.message) for w in caught if "kv_bits=4" in str(w.message)]
    assert len(messages) == 1 and "H2OCache(model, kv_bits=4)" in messages[0]


def test_the_keys_of_a_model_without_weights_are_not_transformed(make_llama, capsys):
    with torch.device("meta"):
        model = type(make_llama())(make_llama().config)
    assert transforms_of_model(model) == {} and transforms_of_model(model) == {}
    note = "note: keys are rounded to 4 bits without centering"
    assert capsys.readouterr().err.count(note) == 1


def test_a_window_shorter_than_what_is_measured_has_room(make_llama, capsys):
    """RoPE scaling reaches further than the window in which positions roll."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    model = make_llama(rope_parameters={**scaling, "rope_theta": 10000.0})
    for window in (128, 300):
        model.config.max_position_embeddings = window
        model.lm_head.weight.data += 0.0  # measured again
        cache = cache_of(model, 8, 4, kv_bits=4, positions="rolling")
        assert cache.transforms_keys
    assert "note" not in capsys.readouterr().err


@torch.no_grad()
def test_offset_keys_cost_a_trained_model_little():
    """The divergence of next-token distributions, in nats, over 60 steps of a novel."""
    path = bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="h2o", dtype=torch.float32
    )
    with_offsets(model, 6.0)
    ids = AutoTokenizer.from_pretrained(path)(sample_prompt()[:2000], return_tensors="pt")
    ids = ids.input_ids[:, :360]

    def predictions(source, **options):
        cache = cache_of(source, 32, 32, **options)
        logits = run(model, cache, ids, [300, *[1] * 60])
        return logits[0, 300:].log_softmax(dim=-1)

    exact = predictions(model.config)

    def divergence(source):
        packed = predictions(source, kv_bits=4)
        return float((exact.exp() * (exact - packed)).sum(dim=-1).mean())

    changed, as_they_are = divergence(model), divergence(model.config)
    assert changed < 2e-2 and changed < as_they_are / 2
