"""Models with learned sinks: what the tests of every family do not ask of them."""

from dataclasses import replace

import pytest
import torch
from family_harness import (
    TOLERANCE,
    generate,
    kept_sets,
    tiny_model,
    tokens,
)
from family_table import FAMILIES
from oracle import cache_of
from transformers import AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.policy import H2O
from h2okv_lab.analysis.attention_stats import read_observed
from h2okv_lab.shared import SharedPrefill

GPT_OSS = next(family for family in FAMILIES if family.model_type == "gpt_oss")
# Sinks in every layer that H2O sees.
FULL = replace(GPT_OSS, options=GPT_OSS.options | {"layer_types": ["full_attention"] * 2})
BUDGET = {"heavy": 6, "recent": 4}
OPTIONS = [
    {"policy": "best"}, {"scoring": "expected", "evict_every": 4}, {"scoring": "decay"},
    {"policy": "snapkv"}, {"kv_bits": 8}, {"evict_every": 7}, {"positions": "rolling"},
    {"layer_budgets": [[0.5, 1.5], [1.25, 0.75]]},
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_model(FULL, 2)


@torch.no_grad()
def test_a_rule_and_the_analysis_see_the_same_probabilities(model):
    seen = {}

    class Watching(H2O):
        def score_block(self, block):
            seen[block.layer_idx] = block.probabilities().flatten(1, 2)
            torch.testing.assert_close(block.probabilities().sum(dim=(2, 3)), block.sums)
            return block.sums

    ids, rows = tokens(1, 30), {}
    model.set_attn_implementation("h2o")
    model(ids, past_key_values=cache_of(model.config, **BUDGET, policy=Watching()))

    def keep(layer):
        rows[layer.layer_idx] = torch.cat([p.flatten(0, 1) for _, p in layer.rows()], dim=1)

    read_observed(model, ids, keep)
    assert seen.keys() == {0, 1}
    for layer, probabilities in seen.items():
        torch.testing.assert_close(rows[layer], probabilities[0], atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_caches_that_share_a_prompt(model):
    ids = tokens(1, 30)
    model.set_attn_implementation("h2o")
    configs = [{"policy": "best"}, {"scoring": "decay"}, {"scoring": "last"}, {"heavy": 2}]
    caches = [cache_of(model.config, **BUDGET | options) for options in configs]
    shared = SharedPrefill(caches)
    model(ids, past_key_values=shared)
    shared.split()
    for cache, options in zip(caches, configs, strict=True):
        alone = cache_of(model.config, **BUDGET | options)
        model(ids, past_key_values=alone)
        assert kept_sets(cache) == kept_sets(alone)
        step = tokens(1, 1)
        logits = (model(step, past_key_values=c).logits for c in (cache, alone))
        torch.testing.assert_close(*logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, *(o for o in OPTIONS if o.get("policy") != "snapkv")], ids=str
)
def test_requests_of_an_engine_give_what_generate_gives(model, options):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    params = h2okv.SamplingParams(max_tokens=6, temperature=0)
    prompts = [tokens(1, length, seed) for seed, length in enumerate((40, 9, 26, 31))]
    prompts.append(torch.cat([prompts[0], tokens(1, 5)], dim=1))  # a prefix that is kept
    options = BUDGET | options
    with h2okv.LLM(model, tokenizer, max_num_seqs=2, max_prefill_tokens=16, **options) as llm:
        outputs = llm.generate([prompt[0].tolist() for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, _ = generate(model, prompt, cache_of(model.config, **options), "h2o")
        assert output.completions[0].token_ids == expected[0].tolist()
