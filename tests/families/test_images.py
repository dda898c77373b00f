"""Vision-language models: images in prompts, in padded batches, in later turns."""

import pytest
import torch
from family_harness import TOLERANCE, kept_sets
from oracle import cache_of
from transformers import DynamicCache
from vision_table import IMAGE, VISION_FAMILIES, image_inputs, tiny_vision_model

from h2okv.cache.argument import CACHE

NEW = 5
every_family = pytest.mark.parametrize("family", VISION_FAMILIES, ids=lambda family: family.name)
FAMILY = {family.name: family for family in VISION_FAMILIES}
# Sequences of different lengths, so one is padded; images at both ends of blocks of 8 tokens.
BATCH = [[5, "image", 7, "image", 4], [3, "image", 2]]
# Half a prompt's tokens, far below it, and every way of cutting a prompt.
BUDGET = {"heavy": 6, "recent": 4, "sink": 1}
CUTS = {
    "one block": {},
    "chunks": {"evict_every": 8},
    "spans": {"evict_every": 8},
    "expected": {"evict_every": 8, "scoring": "expected"},
}


def generate(family, inputs, cache, attention="h2o"):
    """Greedy tokens and their logits."""
    model = tiny_vision_model(family)
    model.set_attn_implementation(attention)
    generated = model.generate(
        **inputs, **{CACHE: cache}, max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return generated.sequences, torch.stack(generated.logits, dim=1)


def full_cache(family):
    return DynamicCache(config=tiny_vision_model(family).config)


def h2o_cache(family, **options):
    return cache_of(tiny_vision_model(family).config, **options)


def close(logits, expected):
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@every_family
@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_a_large_budget_gives_the_full_cache(family, cut):
    inputs = image_inputs(family, BATCH)
    expected = generate(family, inputs, full_cache(family), "sdpa")
    cache = h2o_cache(family, heavy=100, recent=100, **cut)
    tokens, logits = generate(family, inputs, cache)
    cache.check_integrity()
    close(logits, expected[1])
    assert torch.equal(tokens, expected[0])


@every_family
@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_dropping_equals_masking(family, cut):
    inputs = image_inputs(family, BATCH)
    dropping = h2o_cache(family, **BUDGET, **cut)
    masking = h2o_cache(family, **BUDGET, **cut, masks=True)
    tokens, logits = generate(family, inputs, dropping)
    expected = generate(family, inputs, masking)
    dropping.check_integrity()
    close(logits, expected[1])
    assert kept_sets(dropping) == kept_sets(masking)
    full_logits = generate(family, inputs, full_cache(family), "sdpa")[1]
    assert (logits - full_logits).abs().max() > 100 * TOLERANCE


@every_family
@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_a_padded_sequence_gives_what_it_gives_alone(family, cut):
    together = h2o_cache(family, **BUDGET, **cut)
    inputs = image_inputs(family, BATCH)
    _, logits = generate(family, inputs, together)
    length = int(inputs["attention_mask"][1].sum())
    alone = image_inputs(family, BATCH[1:])
    alone["input_ids"] = inputs["input_ids"][1:, -length:]
    if "image_grid_thw" in alone:
        alone["pixel_values"] = inputs["pixel_values"][-32:]
    else:
        alone["pixel_values"] = inputs["pixel_values"][-1:]
    cache = h2o_cache(family, **BUDGET, **cut)
    _, expected = generate(family, alone, cache)
    close(logits[1], expected[0])
    sets, kept_alone = kept_sets(together), kept_sets(cache)
    assert {layer: rows[1] for layer, rows in sets.items()} == {
        layer: rows[0] for layer, rows in kept_alone.items()
    }


@every_family
def test_a_later_turn_goes_on_as_with_the_full_cache(family):
    inputs = image_inputs(family, BATCH[:1])
    outputs = []
    for cache, attention in (
        (full_cache(family), "sdpa"),
        (h2o_cache(family, heavy=100, recent=100), "h2o"),
    ):
        model = tiny_vision_model(family)
        model.set_attn_implementation(attention)
        options = {"max_new_tokens": NEW, "do_sample": False, CACHE: cache}
        first = model.generate(**inputs, **options)
        more = torch.cat([first, torch.arange(20, 29).unsqueeze(0)], dim=1)
        turn = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        if family.types is not None:
            turn[family.types] = (more == IMAGE).int()
        outputs.append(
            model.generate(
                **turn, **options, output_logits=True, return_dict_in_generate=True
            ).logits
        )
    close(torch.stack(outputs[1]), torch.stack(outputs[0]))


@pytest.mark.parametrize("name", ["Llava", "SmolVLM", "Gemma 3"])
@pytest.mark.parametrize("budget", [100, 6])
def test_a_later_turn_may_bring_an_image(name, budget):
    family = FAMILY[name]
    inputs = image_inputs(family, BATCH[:1])
    turn = image_inputs(family, [[6, "image", 3]], seed=2)
    is_whole = budget == 100
    caches = {
        "h2o": h2o_cache(family, heavy=budget, recent=budget),
        "other": full_cache(family)
        if is_whole
        else h2o_cache(family, heavy=budget, recent=budget, masks=True),
    }
    logits = []
    for label, cache in caches.items():
        attention = "h2o" if label == "h2o" or not is_whole else "sdpa"
        first, _ = generate(family, inputs, cache, attention)
        more = torch.cat([first, turn["input_ids"]], dim=1)
        second = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        if family.types is not None:
            second[family.types] = (more == IMAGE).int()
        second["pixel_values"] = turn["pixel_values"]
        logits.append(generate(family, second, cache, attention)[1])
    close(logits[0], logits[1])


@every_family
def test_a_pinned_image_stays_whole_and_what_remains_of_another_is_visible(family):
    inputs = image_inputs(family, BATCH[:1])
    columns = (inputs["input_ids"][0] == IMAGE).nonzero().flatten().tolist()
    first = columns[: family.image_tokens]
    cache = h2o_cache(family, heavy=family.image_tokens + 4, recent=4)
    cache.pin([(first[0], first[-1] + 1)])
    generate(family, inputs, cache)
    for rows in kept_sets(cache).values():
        for positions in rows[0]:
            assert set(first) <= positions
            assert len(positions & set(columns)) < len(columns)


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL"])
def test_positions_of_three_axes_cannot_roll(name):
    with pytest.raises(ValueError, match="M-RoPE.*use positions='original'"):
        h2o_cache(FAMILY[name], positions="rolling")
