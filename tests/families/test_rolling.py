"""Rolling positions of every family with rotary positions, by three oracles."""

from dataclasses import replace

import pytest
import torch
from family_harness import TOLERANCE, tokens
from family_table import FAMILIES, Family, _rope, config_options, variant_id, variants
from oracle import cache_of
from transformers import AutoConfig, AutoModelForCausalLM

import h2okv

CHUNK, LENGTH = 5, 40
SINK, RECENT = 3, 5
WITHOUT_ROTARY = {"opt", "gpt2", "gpt_bigcode"}
LONG = Family(
    "Phi-3, LongRoPE",
    "phi3",
    {"sliding_window": None, "original_max_position_embeddings": 16, "max_position_embeddings": 256}
    | _rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0])
    | {"num_hidden_layers": 2},
)
ROTARY = [
    variant for variant in [*variants(), (LONG, 2)] if variant[0].model_type not in WITHOUT_ROTARY
]


def one_layer(family: Family) -> list[dict]:
    """Configs of one full-attention layer: with rotary positions, and without where both are."""
    options = {"num_hidden_layers": 1}
    if "layer_types" in family.options:
        options["layer_types"] = ["full_attention"]
    if "no_rope_layers" in family.options:
        return [options | {"no_rope_layers": [rotated]} for rotated in (0, 1)]
    return [options]


@pytest.mark.parametrize("variant", ROTARY, ids=variant_id)
@torch.no_grad()
def test_entries_sit_at_their_ranks(variant):
    """A layer's keys depend on nothing but its token, so the oracle reads the kept tokens again."""
    family, heads = variant
    for options in one_layer(family):
        single = replace(family, options=family.options | options)
        config = AutoConfig.for_model(family.model_type, **config_options(single, heads))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        ids = tokens(2, LENGTH + 2)
        cache = cache_of(
            config, 0, RECENT, SINK, policy="sink_recent", positions="rolling", evict_every=CHUNK
        )
        with h2okv.enable(model):
            block = model(ids[:, :LENGTH], past_key_values=cache).logits[:, -CHUNK:]
            for at in (LENGTH, LENGTH + 1):
                step = model(ids[:, at : at + 1], past_key_values=cache).logits
        # Since the cut before the block, and before the two steps.
        for logits, cut, stop in ((block, LENGTH - CHUNK, LENGTH), (step, LENGTH, LENGTH + 2)):
            remaining = torch.cat([ids[:, :SINK], ids[:, cut - RECENT : stop]], dim=1)
            expected = model(remaining, use_cache=False).logits[:, -logits.shape[1] :]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: variant_id((family, None)))
def test_only_rotary_positions_roll(family):
    config = AutoConfig.for_model(family.model_type, **config_options(family, None))
    if family.model_type in WITHOUT_ROTARY:
        with pytest.raises(ValueError, match="positions='clamped'"):
            cache_of(config, positions="rolling")
    else:
        cache_of(config, positions="rolling")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"positions": "rolling"}, "^positions='rolling': .*run each sequence alone, or use pos"),
        ({"scoring": "expected"}, "^scoring='expected' .*sequence alone, or use policy='h2o'"),
    ],
    ids=["rolling", "expected"],
)
@torch.no_grad()
def test_padding_is_refused_where_a_model_tells_no_positions(options, refusal):
    family = next(f for f in FAMILIES if f.model_type == "llama4_text")
    rotated = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "no_rope_layers": [1]}
    config = AutoConfig.for_model("llama4_text", **config_options(family, 4) | rotated)
    model = AutoModelForCausalLM.from_config(config)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    cache = cache_of(config, 4, 4, **options)
    with h2okv.enable(model), pytest.raises(ValueError, match=refusal):
        model(tokens(2, 9), attention_mask=mask, past_key_values=cache)
