"""The decode step under torch.compile: one graph, compiled once, with eager's results."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import h2okv

pytestmark = pytest.mark.slow
STEPS = 20


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decode(model, forward, ids, budget, prompt):
    """Reads the prompt eagerly, then steps through the rest; returns the cache and the logits."""
    cache = h2okv.H2OCache(model.config, **budget)
    model(ids[:, :prompt], past_key_values=cache)
    logits = []
    for at in range(prompt, prompt + STEPS):
        step = ids[:, at : at + 1].contiguous()
        logits.append(forward(step, past_key_values=cache, use_cache=True).logits)
    return cache, torch.cat(logits, dim=1)


# From a full cache, and from one that fills up only while decoding.
@pytest.mark.parametrize("budget", [{"heavy": 6, "recent": 5}, {"heavy": 9, "recent": 16}])
@pytest.mark.parametrize(
    "options",
    [{}, {"sink": 2}, {"policy": "sink_recent"}, {"positions": "rolling"}, {"scoring": "mean"},
     {"scoring": "decay"}, {"scoring": "value_norm", "positions": "rolling"}],
)  # fmt: skip
@torch.no_grad()
def test_decode_compiles_once(make_llama, budget, options):
    model = make_llama(heads=4, kv_heads=2)
    ids = torch.randint(1, 97, (2, 16 + STEPS))
    budget = budget | options
    expected, expected_logits = decode(model, model, ids, budget, 16)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    cache, logits = decode(model, compiled, ids, budget, 16)
    assert counter.frame_count == 1
    torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=1e-5)
    for layer in range(len(cache.layers)):
        assert torch.equal(cache.kept_positions(layer), expected.kept_positions(layer))
        torch.testing.assert_close(cache.scores(layer), expected.scores(layer))
    cache.check_integrity()


@torch.no_grad()
def test_slots_that_grow_are_all_made_by_the_first_compiled_step(make_llama):
    """Compiled once for the step that makes them, and once for all others."""
    model = make_llama()
    ids, budget = torch.randint(1, 97, (2, 16 + STEPS)), {"heavy": 90, "recent": 10}
    expected, expected_logits = decode(model, model, ids, budget, 16)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    cache, logits = decode(model, compiled, ids, budget, 16)
    assert counter.frame_count <= 2
    assert cache.kept_positions(0).shape[2] == 101 > expected.kept_positions(0).shape[2]
    torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=1e-5)
    cache.check_integrity()
