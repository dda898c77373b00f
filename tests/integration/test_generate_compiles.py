"""`generate` compiles the steps of an `H2OCache` by itself, as it does for a `StaticCache`.

It does so on a GPU; a flag of transformers' own tests makes it do so here.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, StaticCache

import h2okv
from h2okv.ops import dispatch

pytestmark = pytest.mark.slow
NEW = 14
BACKEND = "h2okv_counter"
counter = CompileCounter()


@pytest.fixture(scope="module", autouse=True)
def _backend():
    torch._dynamo.register_backend(lambda graph, inputs: counter(graph, inputs), name=BACKEND)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counter.clear()
    yield
    torch._dynamo.reset()


def everywhere():
    config = CompileConfig(fullgraph=True, backend=BACKEND, mode="default")
    config._compile_all_devices = True
    return config


def generate(model, cache, ids, mask=None, **options):
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False,
        **options,
    )  # fmt: skip


def test_generate_compiles_as_with_a_static_cache(make_llama):
    model = make_llama(attention="sdpa")
    ids = torch.randint(2, 97, (2, 30))
    cache = StaticCache(config=model.config, max_cache_len=60)
    generate(model, cache, ids, compile_config=everywhere())
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", [{}, {"positions": "rolling"}, {"sink": 2, "heavy": 0.1}])
@pytest.mark.parametrize("is_padded", [False, True])
def test_generate_compiles_one_graph_and_gives_the_same_text(
    make_llama, kept_sets, options, is_padded
):
    model = make_llama()
    ids, mask = torch.randint(2, 97, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[0, : 9 * is_padded] = 0
    budget = {"heavy": 5, "recent": 6} | options
    with dispatch.use("plain"):
        plain = h2okv.H2OCache(model.config, **budget)
        expected = generate(model, plain, ids, mask)
        assert counter.frame_count == 0
        for _ in range(2):
            cache = h2okv.H2OCache(model.config, **budget)
            assert cache.is_compileable
            output = generate(model, cache, ids, mask, compile_config=everywhere())
            assert torch.equal(output, expected)
            assert kept_sets(cache) == kept_sets(plain)
            cache.check_integrity()
    assert counter.frame_count == 1


def test_a_growing_cache_is_not_compiled(make_llama):
    model = make_llama()
    for options in ({"policy": "full"}, {"simulate": True}):
        cache = h2okv.H2OCache(model.config, **options)
        assert not cache.is_compileable
        generate(model, cache, torch.randint(2, 97, (1, 20)), compile_config=everywhere())
    assert counter.frame_count == 0


def test_inside_enable_nothing_is_compiled_twice(make_llama):
    model = make_llama(attention="sdpa")
    with h2okv.enable(model):
        cache = h2okv.H2OCache(model.config, heavy=5, recent=6)
        ids = torch.randint(2, 97, (2, 30))
        text = generate(model, cache, ids, compile_config=everywhere())
        generate(model, cache, text, compile_config=everywhere())
    assert counter.frame_count == 1
