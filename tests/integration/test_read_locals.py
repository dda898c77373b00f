"""transformers' functions whose local variables the cache reads: a rename must not pass unseen."""

import inspect

import pytest
from transformers import masking_utils
from transformers.generation.utils import GenerationMixin

from h2okv.cache.argument import CACHE
from h2okv.cache.drafting import _CALLS, _DRAFTS

REMEDY = "read the new name too (h2okv.cache.drafting, H2OCache.get_mask_sizes)"


def names_in(function) -> set[str]:
    code = inspect.unwrap(function).__code__
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


@pytest.mark.skipif(CACHE != "cache", reason="caches record their past from transformers 5.24 on")
@pytest.mark.parametrize("name", _CALLS)
def test_what_drafts_follow_has_its_names(name):
    function = getattr(GenerationMixin, name, None)
    assert function is not None, f"transformers has no GenerationMixin.{name}; {REMEDY}"
    read = {"generation_config"}
    if name == _DRAFTS:
        read |= {"self", "model_kwargs", "input_ids"}
    assert not read - names_in(function), f"{name} lacks {read - names_in(function)}; {REMEDY}"
    assert "activate_past_recording" in inspect.getsource(inspect.unwrap(function)), (
        f"{name} no longer lets a cache record its past; {REMEDY}"
    )


def test_what_makes_masks_has_its_names():
    callers = [
        function
        for function in vars(masking_utils).values()
        if inspect.isfunction(function) and "get_mask_sizes" in function.__code__.co_names
    ]
    assert callers, f"no function of transformers.masking_utils asks for mask sizes; {REMEDY}"
    for function in callers:
        lacking = {"attention_mask", "position_ids"} - names_in(function)
        assert not lacking, f"{function.__name__} lacks {lacking}; {REMEDY}"
