import sys

import pytest
import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

import h2okv
from h2okv.models.names import PACKAGED, SMOLLM2
from h2okv_lab.kvpress_press import H2OPress


def entries_of(cache, number):
    """Return the keys and values of each head in a layer of an H2OCache, in order."""
    keys, values, positions = cache.layers[number].state.by_head("keys", "values", "positions")
    heads = []
    for head in range(keys.shape[1]):
        order = sorted((p, slot) for slot, p in enumerate(positions[0, head].tolist()) if p >= 0)
        slots = [slot for _, slot in order]
        heads.append(torch.cat([keys[0, head, slots], values[0, head, slots]], dim=-1))
    return heads


def entries_in(cache, model, number):
    """Return the same of what a press left, in any order."""
    layer = cache.layers[number]
    is_there = torch.ones(layer.keys.shape[:3], dtype=torch.bool)
    if (hidden := model.model.layers[number].self_attn.masked_key_indices) is not None:
        is_there[hidden] = False
    both = torch.cat([layer.keys, layer.values], dim=-1)
    return [both[0, head, is_there[0, head]] for head in range(both.shape[1])]


def compressed(model, press, ids):
    """Read a prompt as kvpress' pipeline does."""
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model.model(input_ids=ids, past_key_values=cache)
    return cache


def check_entries(model, press, ids):
    """Check that a press leaves what an H2OCache holds after the same prompt; return both."""
    expected = h2okv.H2OCache(model, press.policy, budget=press.budget)
    with torch.no_grad(), h2okv.enable(model):
        model.model(input_ids=ids, past_key_values=expected)
    cache = compressed(model, press, ids)  # after it: kvpress forgets what it hides at a prompt
    for number in range(len(expected.layers)):
        heads = zip(entries_in(cache, model, number), entries_of(expected, number), strict=True)
        for entries, others in heads:
            assert len(entries) == len(others)
            rows = {tuple(row) for row in entries.tolist()}
            assert rows == {tuple(row) for row in others.tolist()}
    return cache, expected


def logits_after(model, cache, ids, seen):
    """Read a question as kvpress' pipeline does."""
    positions = torch.arange(seen, seen + ids.shape[1])[None]
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, position_ids=positions).logits


PROMPT = torch.arange(2, 82)[None]
QUESTION = torch.arange(11, 17)[None]


@pytest.mark.filterwarnings("ignore:.*fractions were taken of the first forward")
@pytest.mark.parametrize("policy", ["h2o", "h2o,every=16", "h2o,bits=8", "sink_recent", "full"])
def test_a_press_leaves_what_the_cache_holds(make_llama, policy):
    model = make_llama(attention="sdpa").float()
    press = H2OPress(policy, budget="full" if policy == "full" else 0.25)
    if "bits" in policy:
        cache, expected = compressed(model, press, PROMPT), None
        assert [layer.keys.shape[2] for layer in cache.layers] == [20, 20]
    else:
        cache, expected = check_entries(model, press, PROMPT)
    assert model.config._attn_implementation == "sdpa"
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks
    if expected is not None:  # a block attends to what is kept and to itself
        logits = logits_after(model, cache, QUESTION, 80)
        with h2okv.enable(model):
            torch.testing.assert_close(logits, logits_after(model, expected, QUESTION, 80))


def test_a_question_and_an_answer_lose_nothing(make_llama):
    model, press = make_llama(attention="sdpa"), H2OPress("h2o", 16)
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        output = model(input_ids=PROMPT, past_key_values=cache)
        assert (output.get("cache") or output.past_key_values) is cache
        model(input_ids=QUESTION, past_key_values=cache)
    assert cache.get_seq_length() == 22


def test_budgets_are_measured_and_heads_of_different_sizes_need_kvpress(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = h2okv.load("bundled")
    h2okv.disable(model)
    ids = tokenizer(h2okv.sample_article()[:600], return_tensors="pt").input_ids
    with pytest.raises(ValueError, match="kvpress is not installed.*pip install kvpress==0.5.5"):
        compressed(model, H2OPress(budget=0.25), ids)
    assert list((tmp_path / "h2okv" / "layer-budgets").iterdir())
    assert model.config._attn_implementation == "sdpa" and not model.model._forward_hooks


def test_the_evaluation_sets_a_compression_ratio():
    press = H2OPress("h2o", "25%")
    assert press.compression_ratio == 0.75
    press.compression_ratio = 0.8
    assert press.budget == 0.2 and str(press) == "H2OPress(policy='h2o', budget=0.2)"
    press.compression_ratio = 0
    assert press.budget == "full" and press.compression_ratio == 0
    assert not hasattr(H2OPress("h2o", 64), "compression_ratio")
    with pytest.raises(ValueError, match="compression_ratio must be from 0 to below 1, got 1"):
        press.compression_ratio = 1


def test_what_kvpress_cannot_continue_from_is_refused(make_llama):
    press = H2OPress("h2o,positions=rolling,every=16", 0.25)
    with pytest.raises(ValueError, match="cannot continue from positions=rolling; use H2OCache"):
        compressed(make_llama(attention="sdpa"), press, PROMPT)
    config = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "sliding_window": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config, **heads, **kinds)).eval()
    with pytest.raises(ValueError, match="cannot continue from DynamicSlidingWindowLayer"):
        compressed(model, H2OPress("h2o", 0.25), PROMPT)


@pytest.mark.skipif(PACKAGED[SMOLLM2].find() is None, reason="SmolLM2 is not on this machine")
@pytest.mark.parametrize("policy", ["h2o", "best", "best,every=64"])
def test_20_prompts_in_the_pipeline_of_kvpress(policy):
    """Check the entries, and what a question reads from them."""
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
    model, tokenizer = h2okv.load("smollm2")
    h2okv.disable(model)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    folder = h2okv.recipe_path().parents[1] / "assets"
    ids = [tokenizer.encode(path.read_text("utf-8")) for path in sorted(folder.glob("*.txt"))]
    question = torch.tensor([tokenizer.encode("\nThe text above is about")])
    prompts = [row[start : start + 256] for row in ids for start in range(0, len(row) - 256, 256)]
    assert len(prompts) >= 20
    for prompt in prompts[:20]:
        press = H2OPress(policy, 0.25)
        cache, expected = check_entries(model, press, torch.tensor([prompt]))
        logits = logits_after(model, cache, question, 256)
        with h2okv.enable(model):
            others = logits_after(model, expected, question, 256)
        torch.testing.assert_close(logits, others, atol=2e-2, rtol=1e-3)
    text = pipe(tokenizer.decode(prompts[0]), question="?", press=press, max_new_tokens=4)["answer"]
    assert isinstance(text, str)
