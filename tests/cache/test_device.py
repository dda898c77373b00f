"""Launches and waits of the package on a GPU, for each layer, counted on a pretended device."""

import pytest
import torch
from pretended_device import DEVICE, PretendedTensor, pretended_device
from transformers import LlamaConfig, LlamaForCausalLM

import h2okv
from h2okv.cache.argument import CACHE

pytest.importorskip("triton")

PROMPT, CUT = 24, 8
BUDGET = {"heavy": 8, "recent": 6, "sink": 2}
EXPECTED = BUDGET | {"scoring": "expected"}
SPANS = {"evict_every": CUT}
BY_HEAD = [1.2, 0.8]  # factors of a layer's heads
OPTIONS = {
    "h2o": BUDGET,
    "expected": EXPECTED,
    "best by head": EXPECTED | {"layer_budgets": BY_HEAD},
    "h2o, spans": BUDGET | SPANS,
    "expected, spans": EXPECTED | SPANS,
    "best by head, spans": EXPECTED | SPANS | {"layer_budgets": BY_HEAD},
}
# Launches and waits of a layer, and those of a forward beside its layers', as measured. They may
# only fall: who lowers one, lowers it here.
BOUNDS = {}


@pytest.fixture
def device(monkeypatch):
    with pretended_device(monkeypatch) as device:
        yield device


def make_model(layers, dtype=torch.float16):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.set_attn_implementation("h2o")
    return model


def make_cache(model, name):
    options = dict(OPTIONS[name])
    if "layer_budgets" in options:
        options["layer_budgets"] = [options["layer_budgets"]] * model.config.num_hidden_layers
    return h2okv.H2OCache(model.config, **options)


def token_ids(length):
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(1))


def measured(device, name, layers):
    """Return the counts of a prompt, a chunk of a longer one, a step, and one that ends a span."""
    model, counts = device.to(make_model(layers)), {}

    def read(cache, length):
        ids = token_ids(length).to(DEVICE)
        with torch.no_grad(), device.count() as counted:
            model(ids, logits_to_keep=1, **{CACHE: cache})
        return counted

    read(make_cache(model, name), PROMPT)  # what is learned of a model is known then
    cache = make_cache(model, name)
    counts["prompt"] = read(cache, PROMPT)
    read(cache, 1)
    counts["step"] = read(cache, 1)
    if "spans" in name:
        for _ in range(CUT - 3):
            read(cache, 1)
        counts["cut"] = read(cache, 1)
        longer = read(make_cache(model, name), PROMPT + CUT)
        counts["chunk"] = longer - counts["prompt"]
    return counts


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_launches_and_waits_no_more_than_it_did(device, name):
    few, more = (measured(device, name, layers) for layers in (2, 3))
    for kind, counts in more.items():
        layer = counts - few[kind]
        once = few[kind] - layer - layer
        actual = layer.num_launches, layer.num_waits, once.num_launches, once.num_waits
        bounds = BOUNDS[name][kind]
        above = any(count > bound for count, bound in zip(actual, bounds, strict=True))
        assert not above, f"{name}, {kind}: {actual}, allowed {bounds}; a layer:\n{layer}\n{once}"
