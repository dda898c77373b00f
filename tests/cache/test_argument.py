"""The name of the argument by which the installed transformers takes a cache."""

import inspect
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import h2okv
from h2okv.cache.argument import CACHE, cache_in

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_name_is_the_one_that_models_take():
    assert CACHE in inspect.signature(LlamaForCausalLM.forward).parameters
    assert cache_in({"past_key_values": 1}) == cache_in({"cache": 1}) == 1
    assert cache_in({"input_ids": 1}) is None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_that_show_one_name_tell_the_other(path):
    text = path.read_text(encoding="utf-8")
    if "model.generate(" in text:
        assert "# Before transformers 5.24: past_key_values=" in text and "cache=" in text


@pytest.mark.parametrize("name", h2okv.__all__)
def test_docstrings_that_show_one_name_tell_the_other(name):
    value = getattr(h2okv, name)
    methods = vars(value).values() if inspect.isclass(value) else ()
    for documented in (value, *methods):
        text = getattr(documented, "__doc__", None) or ""
        if "cache=cache" in text:
            assert "past_key_values=cache" in text
