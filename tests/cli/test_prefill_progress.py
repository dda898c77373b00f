import io

import pytest
import torch

from h2okv.engine.generation import LONG_PROMPT, prefill_progress


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


def test_a_long_prompt_at_a_terminal_shows_a_bar_and_leaves_no_hooks(make_llama, replace_stderr):
    terminal = replace_stderr()
    model = make_llama(attention="sdpa", layers=3)
    with prefill_progress(model, LONG_PROMPT, show=True) as bar:
        assert len(hooks(model)) == len(model.model.layers) == 3
        assert all(layer._forward_hooks for layer in model.model.layers)
        model(torch.ones(1, 4, dtype=torch.long))
        bar.close()
        assert hooks(model) == []
    assert f"reading {LONG_PROMPT:,} tokens" in terminal.getvalue()


def test_an_error_removes_the_hooks_too(make_llama, replace_stderr):
    replace_stderr()
    model = make_llama()
    with pytest.raises(KeyboardInterrupt), prefill_progress(model, LONG_PROMPT, show=True):
        raise KeyboardInterrupt
    assert hooks(model) == []


@pytest.mark.parametrize(("tokens", "show"), [(LONG_PROMPT - 1, True), (LONG_PROMPT, False)])
def test_no_bar_for_a_short_prompt_or_without_show(make_llama, replace_stderr, tokens, show):
    terminal = replace_stderr()
    model = make_llama()
    with prefill_progress(model, tokens, show):
        assert hooks(model) == []
    assert terminal.getvalue() == ""


def test_no_bar_if_stderr_is_not_a_terminal(make_llama, replace_stderr):
    stream = replace_stderr(io.StringIO())
    with prefill_progress(make_llama(), LONG_PROMPT, show=True):
        pass
    assert stream.getvalue() == ""
