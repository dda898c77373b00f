"""Operations of a step: a small model's takes as long as the number of its operations lets it."""

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GptOssConfig, GptOssForCausalLM, StaticCache

import h2okv

LENGTH, STEPS = 24, 12
_VIEWS = {
    "view", "_unsafe_view", "transpose", "unsqueeze", "expand", "slice", "t", "detach", "alias",
    "permute", "select", "split", "squeeze", "unbind",
}  # fmt: skip


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation.overloadpacket.__name__ not in _VIEWS
        return operation(*args, **(kwargs or {}))


def _operations_of_a_step(model, cache):
    ids = torch.randint(3, 97, (1, LENGTH + STEPS), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for chunk in (ids[:, :LENGTH], *ids[:, LENGTH:].split(1, dim=1)):
            with _Operations() as operations:
                model(chunk, past_key_values=cache)
    return operations.count


def _added_operations(make_llama, make_cache, other, dtype=torch.float32):
    """Return the operations of a layer that another cache does without."""
    counts = []
    for layers in (2, 3):
        model = make_llama(layers=layers).to(dtype)
        evicting = _operations_of_a_step(model, make_cache(model.config))
        model.set_attn_implementation("sdpa")
        counts.append(evicting - _operations_of_a_step(model, other(model.config)))
    return counts[1] - counts[0]


def _by_head(config):
    return [[0.5, 1.5]] * config.num_hidden_layers


@pytest.mark.parametrize(
    ("dtype", "scoring", "is_by_head", "limit"),
    [(torch.float32, "sum", False, 11), (torch.bfloat16, "sum", False, 15),
     (torch.float32, "expected", False, 16), (torch.float32, "expected", True, 19)],
)  # fmt: skip
def test_a_step_that_evicts_has_few_more_operations_a_layer_than_a_static_cache(
    make_llama, dtype, scoring, is_by_head, limit
):
    def evicting(config):
        budgets = _by_head(config) if is_by_head else None
        return h2okv.H2OCache(config, 6, 5, 2, scoring=scoring, layer_budgets=budgets)

    def static(config):
        return StaticCache(config, max_cache_len=LENGTH + STEPS)

    assert _added_operations(make_llama, evicting, static, dtype) <= limit


@pytest.mark.parametrize(
    ("scoring", "is_by_head", "limit"),
    [("sum", False, 7), ("expected", False, 9), ("expected", True, 10)],
)
def test_a_step_between_cuts_has_few_more_operations_a_layer_than_a_full_cache(
    make_llama, scoring, is_by_head, limit
):
    def evicting(config):
        budgets = _by_head(config) if is_by_head else None
        return h2okv.H2OCache(
            config, 6, 5, 2, evict_every=16, scoring=scoring, layer_budgets=budgets
        )

    def full(config):
        return DynamicCache(config=config)

    assert _added_operations(make_llama, evicting, full) <= limit


@torch.no_grad()
def test_steps_make_no_spec_of_their_own():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**sizes, **heads, **experts, layer_types=["full_attention"])
    model = GptOssForCausalLM(config).eval()
    h2okv.enable(model)
    cache = h2okv.H2OCache(config, 6, 5, 2)
    model(torch.ones(1, LENGTH, dtype=torch.long), past_key_values=cache)
    layer = cache.layers[0]
    spec = layer.attention_spec
    assert spec.sinks is model.model.layers[0].self_attn.sinks
    for _ in range(3):
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        assert layer.attention_spec is spec
    # The sinks are the model's: copies share them, and pickles have none.
    assert copy.deepcopy(cache).layers[0].attention_spec is spec
    assert pickle.loads(pickle.dumps(cache)).layers[0].attention_spec is None


def test_forget_refuses_what_it_cannot_take_out(make_llama):
    model = make_llama()
    cache = h2okv.H2OCache(model, heavy=4, recent=4, sink=2)
    with pytest.raises(ValueError, match=r"forget: the cache is empty; run the model"):
        cache.forget([(2, 4)])
    with torch.no_grad():
        model(torch.arange(3, 23).unsqueeze(0), past_key_values=cache)
    before = cache.num_cached_tokens
    for spans, message in [
        ([(4, 21)], r"span \(4, 21\) ends after the 20 tokens seen; shorten it"),
        ([(1, 4)], r"span \(1, 4\) begins in the sink, the first 2 tokens, which stay; begin at 2"),
        ([(4, 2)], r"span \(4, 2\) must be \(start, stop\)"),
        ([(3, 6), (5, 9)], r"spans \(3, 6\) and \(5, 9\) overlap"),
        (7, r"spans must be a list of \(start, stop\), got 7"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.forget(spans)
    cache.forget([])
    assert cache.num_cached_tokens == before == 10
    cache.forget([(16, 20)])
    assert cache.num_cached_tokens == 6 and cache.num_seen_tokens == 20
    rolling = h2okv.H2OCache(model, heavy=4, recent=4, positions="rolling")
    with pytest.raises(ValueError, match="forget: positions='rolling' places entries by"):
        rolling.forget([(2, 4)])
