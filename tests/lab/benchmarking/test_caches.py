import pytest
import torch

from h2okv.config import CacheConfig
from h2okv_lab.benchmarking.caches import RUNNERS, CacheSpec, prompt_ids, stored_bytes

CONTEXT, BATCH = 100, 2
H2O = CacheSpec("h2o", CacheConfig(min_tokens=0))  # a fifth of the prompt
ENTRY = 2 * 2 * 2 * 16 * 4  # layers, KV heads, key and value, head size, fp32


def run(model, spec, steps=3, chunk=None):
    runner = spec.runner(model, chunk)
    ids = prompt_ids(model, BATCH, CONTEXT)
    runner.prepare(CONTEXT)
    runner.prefill(ids)
    with runner.decoding():
        for _ in range(steps):
            runner.step(ids[:, :1])
    return runner


def test_the_full_cache_holds_everything(build):
    assert run(build(), CacheSpec("dynamic")).nbytes == BATCH * (CONTEXT + 3) * ENTRY


@pytest.mark.parametrize("chunk", [None, 32])
def test_h2o_holds_its_budget_of_the_whole_prompt(build, chunk):
    runner = run(build(), H2O, chunk=chunk)
    expected = 20 if chunk is None else 20 + runner.cache.num_seen_tokens % chunk
    assert runner.cache.num_cached_tokens == expected
    assert runner.cache.num_seen_tokens == CONTEXT + 3
    if chunk is None:
        assert runner.nbytes == runner.cache.nbytes == BATCH * 21 * (ENTRY + 2 * 2 * 8)


def test_blocks_change_nothing_for_the_full_cache(build):
    at_once, blocks = (run(build(), CacheSpec("dynamic"), chunk=chunk) for chunk in (None, 32))
    assert torch.allclose(at_once.logits, blocks.logits, atol=1e-5)


def test_a_static_cache_stays_full_with_as_many_entries_as_h2o(build):
    runner = run(build(), CacheSpec("static", CacheConfig(min_tokens=0)))
    assert runner.cache.layers[0].keys.shape[2] == 21
    assert runner.cache.get_seq_length() == 21
    before = runner.cache.layers[0].keys.clone()
    with runner.decoding():
        runner.step(torch.full((BATCH, 1), 7))
    changed = (runner.cache.layers[0].keys != before).any(dim=-1).any(dim=0).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [20]


def test_a_budget_above_the_prompt_gives_the_full_caches_logits(build):
    full, h2o = (
        run(build(), spec)
        for spec in (CacheSpec("dynamic"), CacheSpec("h2o", CacheConfig(heavy=200, recent=200)))
    )
    assert torch.allclose(full.logits, h2o.logits, atol=1e-4)


def test_a_runner_that_is_not_installed_has_an_obstacle(monkeypatch):
    import h2okv_lab.benchmarking.caches as module

    monkeypatch.setattr(module, "is_optimum_quanto_available", lambda: False)
    monkeypatch.setattr(module, "is_hqq_available", lambda: False)
    obstacle = RUNNERS["quantized"].obstacle()
    assert obstacle == "not installed (optimum-quanto or hqq)"


def test_packed_tensors_are_counted_in_tuples_and_dicts():
    class Layer:
        def __init__(self):
            self.keys = torch.zeros(10)
            self._quantized_keys = (torch.zeros(6, dtype=torch.uint8), {"scale": torch.zeros(2)})
            self.cumulative_length = torch.zeros(1000)

    class Cache:
        layers = [Layer()]

    assert stored_bytes(Cache()) == 40 + 6 + 8


def test_a_cache_with_spans_keeps_them_in_blocks(build):
    spans = CacheSpec("h2o", CacheConfig(heavy=10, recent=10, evict_every=8))
    assert run(build(), spans, chunk=32).cache.evict_every == 8


def test_on_a_gpu_steps_of_the_full_cache_are_recorded(source, monkeypatch):
    """They overwrite the last entry: as if the prompt were a token shorter."""
    pytest.importorskip("triton")
    pretended = pytest.importorskip("pretended_device")
    model = source.build(torch.float32, torch.device("cpu"))
    ids = prompt_ids(model, BATCH, CONTEXT + 1)
    shorter = CacheSpec("dynamic").runner(model)
    shorter.prepare(CONTEXT)
    shorter.prefill(ids[:, : CONTEXT - 1])
    shorter.step(ids[:, CONTEXT:])
    with pretended.pretended_device(monkeypatch) as device:
        runner = CacheSpec("dynamic").runner(device.to(model))
        ids = ids.to(pretended.DEVICE)
        runner.prepare(CONTEXT)
        runner.prefill(ids[:, :CONTEXT])
        with runner.decoding():
            for column in (3, 5, CONTEXT):
                runner.step(ids[:, column : column + 1])
        assert runner.kernel in ("flash", "cudnn", "math")  # whichever was faster
        assert runner.nbytes == BATCH * CONTEXT * ENTRY
        logits = runner.logits.numbers
    torch.testing.assert_close(logits, shorter.logits)
