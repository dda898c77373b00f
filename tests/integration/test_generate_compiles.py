"""`generate` does not compile the steps of an `H2OCache` by itself, as it does a `StaticCache`'s.

A GPU is where it would; a flag of transformers' own tests makes it do so here.
"""

import pytest
import torch
from oracle import cache_of
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, StaticCache

pytestmark = pytest.mark.slow
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


def generate(model, cache, **options):
    ids = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(2))
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=14, do_sample=False, **options
    )  # fmt: skip


def everywhere():
    config = CompileConfig(fullgraph=True, backend=BACKEND, mode="default")
    config._compile_all_devices = True
    return config


def test_generate_compiles_for_a_static_cache(make_llama):
    model = make_llama(attention="sdpa")
    cache = StaticCache(config=model.config, max_cache_len=60)
    generate(model, cache, compile_config=everywhere())
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"heavy": 0.2, "min_tokens": 0}, {"positions": "rolling"}, {"policy": "full"},
     {"masks": True}],
    ids=str,
)  # fmt: skip
def test_generate_does_not_compile_for_an_h2o_cache(make_llama, options):
    model = make_llama()
    options = {"heavy": 5, "recent": 6} | options if "policy" not in options else options
    expected = generate(model, cache_of(model.config, **options))
    cache = cache_of(model.config, **options)
    assert torch.equal(generate(model, cache, compile_config=everywhere()), expected)
    assert counter.frame_count == 0
