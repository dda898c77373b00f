"""Models that accelerate has offloaded to memory or disk."""

import accelerate
import pytest
import torch
from oracle import cache_of
from transformers import AutoTokenizer, LlamaForCausalLM

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.calibration.factors import measure_layer_budgets
from h2okv.config import CacheConfig
from h2okv.integration.enable import input_device
from h2okv_lab.analysis.attention_stats import dense_losses
from h2okv_lab.evaluation.lm_eval.scorer import Scorer

SMALL = {"heavy": 5, "recent": 6}


def tokens(length=40, rows=1):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["cpu", "disk"])
def offloaded(request, make_llama, tmp_path):
    model = make_llama()
    if request.param == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert model.device.type == "meta" and input_device(model) == torch.device("cpu")
    return model


@pytest.mark.parametrize("options", [{}, {"evict_every": 8}, {"positions": "rolling"}], ids=str)
def test_prefill_of_an_offloaded_model(make_llama, offloaded, options):
    ids, mask, logits = tokens(rows=2), torch.ones(2, 40, dtype=torch.long), []
    padded = mask.clone()
    padded[1, :9] = 0
    for attention_mask in (None, mask, padded):
        for model in (make_llama(), offloaded):
            cache = cache_of(model.config, **SMALL, **options)
            logits.append(h2okv.prefill(model, ids, cache, attention_mask))
            cache.check_integrity()
        torch.testing.assert_close(logits.pop(), logits.pop(), atol=1e-5, rtol=1e-5)


def test_engine_evaluation_and_analysis_of_an_offloaded_model(make_llama, offloaded):
    loaded, ids = make_llama(), tokens()
    assert torch.equal(*(dense_losses_of(model, ids) for model in (loaded, offloaded)))
    config = CacheConfig("h2o", **SMALL)
    logits, expected = (Scorer(model, config).logits(ids) for model in (offloaded, loaded))
    torch.testing.assert_close(logits, expected)
    budgets = [measure_layer_budgets(model, ids) for model in (loaded, offloaded)]
    assert budgets[0] == budgets[1]
    params = h2okv.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    answers, tokenizer = [], AutoTokenizer.from_pretrained(bundled_model_path())
    for model in (loaded, offloaded):
        engine = h2okv.LLM(model, tokenizer, **SMALL, max_prompt_tokens=64)
        prompts = [tokens(length)[0].tolist() for length in (20, 33)]
        outputs = engine.generate(prompts, params, show_progress=False)
        answers.append([output.completions[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def dense_losses_of(model, ids):
    return torch.from_numpy(dense_losses(model, ids)).nan_to_num()


def test_tokens_go_where_the_embedding_runs(make_llama):
    """Spread a model: its first parameter may be on another device than its input."""
    model = make_llama()
    assert input_device(model) == model.device
    with torch.device("meta"):
        assert input_device(LlamaForCausalLM(model.config)) == torch.device("meta")
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cuda:1")
    model.model.embed_tokens._hf_hook = accelerate.hooks.SequentialHook(hook)
    assert input_device(model) == torch.device("cuda:1")
    del model.model.embed_tokens._hf_hook


FACTORS = [[0.5, 1.5], [1.5, 0.5]]


def test_a_model_on_the_meta_device_has_no_numbers_to_hold(make_llama):
    with torch.device("meta"):
        model = LlamaForCausalLM(make_llama().config).eval()
    model.set_attn_implementation("h2o")
    with pytest.raises(ValueError, match="must get keys of a CPU or GPU, got the meta device's"):
        h2okv.prefill(model, tokens(30).to("meta"), cache_of(model.config, **SMALL))
