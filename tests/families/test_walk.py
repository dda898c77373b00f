"""Every causal LM type of the installed transformers works, or is refused before its forward."""

import pytest
import transformers
import walk

# One of each kind of attention, for the quick run; a type that becomes wrong shows in the slow one.
_QUICK = (
    "llama",
    "glm4",  # rotates neighbours
    "deepseek_v2",  # by complex numbers, latents
    "nanochat",  # by minus the angle
    "ministral3",  # attention takes positions
    "beam",  # rotates in sliding layers only
    "ctrl",  # rotates nothing
    "gemma4_text",
    "phi3",
    "lfm2_moe",
    "qwen3_5_text",
    "blt",
    "dory",
    "xlstm",
    "mllama",
)


@pytest.mark.parametrize("model_type", _QUICK)
def test_a_type_does_what_the_table_says(model_type):
    if model_type not in walk.TYPES:
        pytest.skip(f"this version of transformers has no {model_type}")
    kind, why = walk.outcome(model_type)
    expected = "works" if model_type in walk.results()["works"].split() else "refused"
    assert kind == expected, why
    if kind == "works":
        without = walk.results()["without"].items()
        assert [*why] == [setting for setting, types in without if model_type in types.split()]
        for setting, message in why.items():
            assert message.startswith(f"positions={setting!r}")  # which the setting gives


@pytest.mark.slow
def test_no_type_is_wrong_and_the_table_is_of_this_version():
    outcomes = {model_type: walk.outcome(model_type) for model_type in walk.TYPES}
    assert {t: why for t, (kind, why) in outcomes.items() if kind == "wrong"} == {}
    if walk.results()["transformers"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {walk.results()['transformers']}")
    assert walk.summary(outcomes) == walk.results(), "run python tests/families/walk.py --write"


def test_wrong_answers_are_seen(monkeypatch):
    """A cache that evicts other entries than the oracle, or none, does not pass for working."""
    from h2okv.cache.slot_layer import SlotLayer
    from h2okv_lab.masking import MaskedLayer

    with monkeypatch.context() as context:
        context.setattr(MaskedLayer, "_best", lambda layer, total: layer.state.positions >= 0)
        assert walk.outcome("llama")[0] == "wrong"
    with monkeypatch.context() as context:
        attend = SlotLayer.attend
        context.setattr(SlotLayer, "attend", lambda *args, **kw: attend(*args, **kw) * 1.01)
        assert walk.outcome("llama")[0] == "wrong"
