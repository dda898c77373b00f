"""Many settings that read a prompt together hold what each would hold alone."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import h2okv
from h2okv import policy_names
from h2okv.config import SCORINGS, CacheConfig
from h2okv.policy import Inputs, get_rule
from h2okv_lab.evaluation.model import make_cache
from h2okv_lab.masking import MaskedCache
from h2okv_lab.shared import SharedPrefill, read_together

LENGTH, STEPS = 70, 8
FEW, ALL = (0.1, 9), (0.5, 0.1, 9, 200)


def settings(budgets=FEW):
    """Return every policy, every scoring that matters for it, budgets, sinks and bits."""
    configs = [CacheConfig("full"), CacheConfig("full", kv_bits=8)]
    for name in policy_names():
        rule = get_rule(name)
        counts = rule.uses_scores and rule.inputs is not Inputs.WINDOW
        for scoring in SCORINGS if counts else ("sum",):
            for budget in budgets:
                if name != "full":
                    configs.append(
                        CacheConfig(budget=budget, min_tokens=0, policy=name, scoring=scoring)
                    )
    configs += [
        CacheConfig("h2o", sink=3, kv_bits=8, scoring="value_norm"),
        CacheConfig("h2o", 0.3, 0.1, scoring="decay", decay=0.9, kv_bits=4),
        CacheConfig("snapkv", 0.2, 0.2, kv_bits=8),
        CacheConfig("random", seed=3),
    ]
    return configs


def draw(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


@torch.no_grad()
def read(model, cache, ids, mask=None, seen=0):
    """Run one forward; the mask ``[B, seen + T]`` marks padding."""
    mask = (
        torch.ones(ids.shape[0], seen + ids.shape[1], dtype=torch.int64) if mask is None else mask
    )
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache).logits


def share(model, configs):
    return SharedPrefill([make_cache(config, model.config, 0) for config in configs])


def read_alone(model, config, prompt, mask=None):
    cache = make_cache(config, model.config, 0)
    cache.expect(None if mask is not None else prompt.shape[1])
    return cache, read(model, cache, prompt, mask)


def by_position(layer, name):
    """Return a layer's tensor in the order of the text; empty slots first."""
    state = layer.state
    order = state.positions.argsort(dim=-1, stable=True)
    tensor = state.stored(name) if name in ("keys", "values") else vars(state)[name]
    tensor = torch.where(
        (state.positions >= 0).view(*state.positions.shape, *[1] * (tensor.dim() - 3)), tensor, 0
    )
    index = order.view(*order.shape, *[1] * (tensor.dim() - 3)).expand_as(tensor)
    return tensor.gather(2, index)


def assert_same(cache, alone):
    assert cache.cache_config == alone.cache_config
    assert cache.nbytes == alone.nbytes
    for layer, other in zip(cache.layers, alone.layers, strict=True):
        assert torch.equal(by_position(layer, "positions"), by_position(other, "positions"))
        for name in ("keys", "values"):
            # The masking oracle computes attention differently: later keys differ slightly.
            close = {"atol": 1e-5 if isinstance(cache, MaskedCache) else 0, "rtol": 0}
            torch.testing.assert_close(by_position(layer, name), by_position(other, name), **close)
        torch.testing.assert_close(
            by_position(layer, "scores"), by_position(other, "scores"), atol=1e-5, rtol=1e-5
        )
    cache.check_integrity()


@pytest.mark.parametrize(
    ("kv_heads", "budgets"),
    [(2, FEW), *(pytest.param(heads, ALL, marks=pytest.mark.slow) for heads in (4, 2))],
)
def test_shared_prefill_leaves_the_same_entries_as_separate_prefill(make_llama, kv_heads, budgets):
    model, configs = make_llama(4, kv_heads), settings(budgets)
    prompt, later = draw(1, LENGTH), draw(1, STEPS, seed=1)
    shared = share(model, configs)
    first = read(model, shared, prompt)
    shared.split()
    for config, cache in zip(configs, shared.caches, strict=True):
        alone, logits = read_alone(model, config, prompt)
        torch.testing.assert_close(first, logits, atol=1e-5, rtol=0)
        assert_same(cache, alone)
        for step in range(STEPS):
            token = later[:, step : step + 1]
            output, expected = (read(model, x, token, seen=LENGTH + step) for x in (cache, alone))
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
        if not isinstance(cache, MaskedCache):
            assert_same(cache, alone)


def test_decoding_several_caches_in_a_batch_equals_each_alone(make_llama):
    model, configs = make_llama(), settings()
    prompt = draw(2, LENGTH)
    mask = torch.ones_like(prompt)
    mask[1, :20] = 0
    shared = share(model, configs)
    read(model, shared, prompt, mask)
    shared.split()
    alone = [read_alone(model, config, prompt, mask)[0] for config in configs]
    for step in range(STEPS):
        tokens = draw(2 * len(configs), 1, seed=step)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        logits = read(model, shared, tokens, mask.repeat(len(configs), 1))
        for output, token, cache in zip(logits.split(2), tokens.split(2), alone, strict=True):
            expected = read(model, cache, token, mask)
            torch.testing.assert_close(output, expected, atol=2e-5, rtol=0)


def test_prompt_attention_is_computed_once_per_query_weighting(make_llama, monkeypatch):
    from h2okv.ops import dispatch

    plain, lengths = dispatch.blockwise_attention_with_scores, []

    def counted(query, *args):
        lengths.append(query.shape[2])
        return plain(query, *args)

    monkeypatch.setattr(dispatch, "blockwise_attention_with_scores", counted)
    model = make_llama(layers=1)
    configs = [
        CacheConfig(budget=b, min_tokens=0, policy=p) for b in (0.5, 0.2) for p in ("h2o", "recent")
    ]
    configs += [CacheConfig("h2o", scoring="decay"), CacheConfig("snapkv", 0.1, 0.1)]
    read(model, share(model, configs), draw(1, LENGTH))
    # Once for all sums, once for decay, and the window of snapkv: a tenth of the prompt.
    assert lengths == [LENGTH, LENGTH, LENGTH // 10]


def test_sliding_window_layers_are_copied_to_every_cache():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=16, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    model.set_attn_implementation("h2o")
    configs = [CacheConfig("full"), CacheConfig("h2o"), CacheConfig("recent")]
    prompt, token = draw(1, 40), draw(1, 1, seed=1)
    shared = share(model, configs)
    read(model, shared, prompt)
    shared.split()
    together = read(model, shared, token.repeat(3, 1), seen=40)
    for config, cache, logits in zip(configs, shared.caches, together, strict=True):
        alone, _ = read_alone(model, config, prompt)
        expected = read(model, alone, token, seen=40)
        torch.testing.assert_close(logits[None], expected, atol=1e-5, rtol=0)
        assert cache.kept_positions(1).shape == alone.kept_positions(1).shape


@pytest.mark.parametrize(
    "config", [CacheConfig("h2o", evict_every=8), CacheConfig("h2o", positions="rolling")],
)  # fmt: skip
def test_configs_that_cannot_share_the_prompt_are_refused(make_llama, config):
    with pytest.raises(ValueError, match="cannot share the prompt with other caches"):
        share(make_llama(), [config])


def test_read_together_reads_configs_that_cannot_share_alone(make_llama):
    model, prompt, read = make_llama(), draw(1, 40), []

    def prefill(cache):
        read.append(cache)
        h2okv.prefill(model, prompt, cache, torch.ones_like(prompt))

    configs = [
        CacheConfig("h2o"), CacheConfig("h2o", evict_every=8), CacheConfig("recent"),
        CacheConfig("h2o", positions="rolling"),
    ]  # fmt: skip
    caches = [make_cache(config, model.config, 0) for config in configs]
    for cache in caches:
        cache.expect(60)  # a question follows
    read_together(caches, prefill)
    assert [type(layer).__name__ for layer in read] == ["SharedPrefill", "H2OCache", "H2OCache"]
    for config, cache in zip(configs, caches, strict=True):
        alone = make_cache(config, model.config, 0)
        alone.expect(60)
        h2okv.prefill(model, prompt, alone)
        assert cache.num_cached_tokens == alone.num_cached_tokens <= 12 + 64
        for layer, other in zip(cache.layers, alone.layers, strict=True):
            assert torch.equal(by_position(layer, "positions"), by_position(other, "positions"))
