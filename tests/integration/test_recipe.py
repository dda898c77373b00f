import re
import shutil

import pytest
import torch
from oracle import cache_of
from transformers import AutoModelForCausalLM

import h2okv
from h2okv.assets import bundled_model_path

LOGITS = {"output_logits": True, "return_dict_in_generate": True}


@pytest.fixture
def model(make_llama):
    return make_llama(attention="sdpa")


def generate(model, **options):
    input_ids = torch.arange(2, 42)[None]
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=12,
        do_sample=False,
        **options,
    )


def chunks(cache):
    """Read a prompt in the cache's blocks, if it has any."""
    if cache.read_chunk is None:
        return {}
    cache.expect(40)
    return {"prefill_chunk_size": cache.read_chunk}


def by_recipe(model, **options):
    return generate(
        model, custom_generate=str(h2okv.recipe_path()), trust_remote_code=True, **options
    )


def test_a_models_folder_with_the_recipe(tmp_path):
    """`from_pretrained` takes a folder's `custom_generate` for `model.generate`."""
    folder = tmp_path / "model"
    shutil.copytree(bundled_model_path(), folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    expected = by_recipe(plain, heavy=4, recent=4)
    shutil.copytree(h2okv.recipe_path() / "custom_generate", folder / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(generate(model, heavy=4, recent=4), expected)
    assert not torch.equal(expected, generate(plain))


@pytest.mark.parametrize(
    "options",
    [{"scoring": "decay", "decay": 0.5}, {"scoring": "mean"}, {"kv_bits": 4},
     {"policy": "random", "seed": 3}],
)  # fmt: skip
def test_recipe_takes_what_the_cache_takes(model, options):
    options = {"heavy": 3, "recent": 2} | options
    cache = cache_of(model, **options)
    with h2okv.enable(model):
        expected = generate(model, past_key_values=cache, **LOGITS)
    passed, plain = (
        by_recipe(model, **options_of_cache, **LOGITS)
        for options_of_cache in (options, {"heavy": 3, "recent": 2})
    )
    assert torch.equal(by_recipe(model, heavy=40, recent=40), generate(model))
    logits, others = torch.stack(passed.logits), torch.stack(plain.logits)
    assert torch.equal(logits, torch.stack(expected.logits))
    assert not torch.equal(logits, others)  # the option changes something here


@pytest.mark.parametrize(
    "text, options",
    [
        ("h2o:3+2,every=8,bits=8", {"heavy": 3, "recent": 2, "evict_every": 8, "kv_bits": 8}),
        ("h2o:25%,every=prompt+8", {"budget": 0.25, "evict_every": 8, "whole_prompts": True}),
        ("best:20%,layers=even", {"policy": "best", "budget": 0.2, "layer_budgets": None}),
    ],
)
@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_one_text_says_which_cache(model, text, options, argument):
    cache = cache_of(model, min_tokens=0, **options)
    if chunk := cache.read_chunk:
        cache.expect(40)
    with h2okv.enable(model):
        expected = generate(model, past_key_values=cache, prefill_chunk_size=chunk, **LOGITS)
    passed = by_recipe(model, **{argument: f"{text},min=0"}, **LOGITS)
    assert torch.equal(torch.stack(passed.logits), torch.stack(expected.logits))


def readme():
    return (h2okv.recipe_path() / "README.md").read_text("utf-8")


def test_every_cache_of_the_readme_works(model):
    texts = re.findall(r'`"([^"]+)"`', readme().partition("| what stays |")[2])
    assert len(texts) > 8
    for text in texts:
        small = text.replace("512", "48")  # of a model with a window of 512
        assert by_recipe(model, cache=small).shape == (1, 52)


def test_the_code_of_the_readme_runs(tmp_path):
    """Run it with a copy of the folder and a model that it measures."""
    folder = shutil.copytree(h2okv.recipe_path(), tmp_path / "recipe")
    names = {"path": bundled_model_path(), "folder_or_repo": str(folder)}
    names["long_text"] = h2okv.sample_article()[:1500]
    (code,) = re.findall(r"```python\n(.*?)```", readme(), flags=re.S)
    exec(code.replace("max_new_tokens=100", "max_new_tokens=4"), names)
    assert names["output"].shape[1] == names["inputs"].input_ids.shape[1] + 4
    assert names["model"].config._attn_implementation == "sdpa"


def test_recipe_refuses_what_the_cache_refuses(model):
    with pytest.raises(ValueError, match="is above max_tokens=9"):
        by_recipe(model, heavy=0.5, max_tokens=9)
    with pytest.raises(ValueError, match="kv_bits must be 8, 6 or 4, got 3"):
        by_recipe(model, kv_bits=3)


def test_recipe_refuses_what_is_no_cache(model):
    with pytest.raises(ValueError, match="budget is given twice"):
        by_recipe(model, cache="h2o:20%", budget=0.3)
    with pytest.raises(ValueError, match="nonsense"):
        by_recipe(model, cache="nonsense:20%")


def test_recipe_refuses_options_beside_a_cache(model):
    with pytest.raises(ValueError, match="heavy would have no effect on the cache"):
        by_recipe(model, heavy=100, past_key_values=cache_of(model))


def test_recipe_goes_on_with_a_cache(model):
    cache = cache_of(model.config, heavy=6, recent=6)
    by_recipe(model, past_key_values=cache)
    assert cache.num_seen_tokens == 51
    cache.check_integrity()


def test_recipe_refuses_another_cache(model):
    from transformers import DynamicCache

    with pytest.raises(
        ValueError,
        match="is a DynamicCache; .* from a text such as (cache|past_key_values)='best:20%'",
    ):
        by_recipe(model, past_key_values=DynamicCache())
