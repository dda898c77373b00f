"""The commands' default, `best`, on every family: scores by the formula, drops what it masks."""

from dataclasses import replace

import pytest
import torch
from family_harness import (
    TOLERANCE,
    factors_by_head,
    forced_logits,
    full_cache,
    generate,
    kept_sets,
    tiny_model,
    tokens,
)
from family_table import config_options, variant_id, variants
from oracle import cache_of
from test_rolling import LONG, ROTARY, one_layer
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cache.latent import absorb
from h2okv.cache.layer import AHEAD
from h2okv.ops.attention import mean_queries

LENGTH = 12
BUDGET = {"policy": "best", "heavy": 6, "recent": 4}
every_family = pytest.mark.parametrize("variant", variants(), ids=variant_id, scope="module")
# Neighbours, complex numbers and latents, positions that queries grow with, minus the angle.
SERVED = [
    variant
    for variant in variants()
    if variant[0].model_type in ("glm4", "deepseek_v2", "ministral3", "nanochat")
]
_SEEN = []


def _capture(module, query, key, value, mask, **options):
    _SEEN.append((module, query, key, value, options))
    return torch.zeros_like(query[..., :1]).expand(*query.shape[:3], value.shape[-1]), None


AttentionInterface.register("expected_capture", _capture)


def _attention_inputs(model, ids, position_ids):
    _SEEN.clear()
    model(ids, position_ids=position_ids.expand_as(ids), use_cache=False)
    return _SEEN[0]


# LongRoPE has other frequencies where the queries are re-evaluated, beyond its short texts.
@pytest.mark.parametrize("variant", [v for v in ROTARY if v[0] is not LONG], ids=variant_id)
@torch.no_grad()
def test_queries_are_reevaluated_where_the_model_itself_puts_them(variant):
    """One layer: its queries depend on nothing but token and position, so the model makes them."""
    family, heads = variant
    for options in one_layer(family):
        single = replace(family, options=family.options | options)
        config = AutoConfig.for_model(family.model_type, **config_options(single, heads))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()
        ids = tokens(1, LENGTH)
        cache = cache_of(config, policy="full", scoring="expected")
        model(ids, past_key_values=cache)
        scores = cache.scores(0)[0].gather(-1, cache.kept_positions(0)[0].argsort(-1))
        scores = scores[:, -LENGTH:]
        model.set_attn_implementation("expected_capture")
        module, _, key, value, options = _attention_inputs(model, ids, torch.arange(LENGTH))
        query = _attention_inputs(model, ids, torch.tensor(LENGTH - 1 + AHEAD))[1]
        if scores.shape[0] == 1 and hasattr(module, "kv_b_proj"):
            query = absorb(module, query)[0]
            key, value = cache.layers[0].keys, cache.layers[0].values
            order = cache.kept_positions(0)[0, 0].argsort()[-LENGTH:]
            key, value = key[:, :, order], value[:, :, order]
        sinks = options.get("s_aux")
        query = mean_queries(query, key.shape[1])[0].unflatten(0, (key.shape[1], -1))
        logits = query @ key[0, :, None].transpose(-1, -2) * options["scaling"]
        if softcap := options.get("softcap"):
            logits = softcap * (logits / softcap).tanh()
        if sinks is not None:
            sinks = mean_queries(sinks[None], key.shape[1]).view(key.shape[1], -1, 1, 1)
            logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
        norms = logits.softmax(-1)[..., :LENGTH].square().sum(dim=(1, 2)).sqrt()
        expected = norms * value[0].abs().sum(-1)
        torch.testing.assert_close(scores, expected, atol=TOLERANCE, rtol=TOLERANCE)


@every_family
@pytest.mark.parametrize("evict_every", [None, 6])
def test_dropping_equals_masking(variant, evict_every):
    model = tiny_model(*variant)
    factors = factors_by_head(model)
    options = BUDGET | {"layer_budgets": factors, "evict_every": evict_every}
    dropping = cache_of(model.config, **options)
    masking = cache_of(model.config, **options, masks=True)
    logits = forced_logits(model, dropping, "h2o")
    expected = forced_logits(model, masking, "h2o")
    dropping.check_integrity()
    assert kept_sets(dropping) == kept_sets(masking)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    full_logits = forced_logits(model, full_cache(model), "eager")
    assert (logits - full_logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("variant", SERVED, ids=variant_id)
def test_the_engine_gives_what_generate_gives(variant, tmp_path, monkeypatch):
    """As `serve` runs it; the first request measures what it can."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, options = tiny_model(*variant), BUDGET | {"evict_every": 8}
    model.set_attn_implementation("h2o")
    prompts = [tokens(1, length, seed) for seed, length in enumerate((30, 9, 26))]
    params = h2okv.SamplingParams(max_tokens=6, temperature=0)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    with h2okv.LLM(model, tokenizer, max_num_seqs=2, max_prefill_tokens=16, **options) as llm:
        outputs = llm.generate([ids[0].tolist() for ids in prompts], params)
        factors = llm.engine.config.cache.layer_budgets
    for ids, output in zip(prompts, outputs, strict=True):
        cache = cache_of(model.config, **options | {"layer_budgets": factors or "even"})
        expected, _ = generate(model, ids, cache, "h2o")
        assert output.completions[0].token_ids == expected[0].tolist()
