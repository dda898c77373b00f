"""Models that accelerate has offloaded to memory or disk, and models on the meta device."""

import accelerate
import pytest
import torch
from oracle import cache_of
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cache.argument import CACHE
from h2okv.calibration.factors import measure_layer_budgets
from h2okv.config import CacheConfig
from h2okv.integration.enable import input_device
from h2okv_lab.analysis.ablation import dense_losses
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


@pytest.mark.parametrize(
    "options",
    [{}, SMALL, {"positions": "rolling"}, {"kv_bits": 4}, {"scoring": "value_norm"},
     {"scoring": "expected"}, {"scoring": "expected", "evict_every": None}, {"policy": "full"},
     {"policy": "snapkv", **SMALL},
     {"policy": "keydiff"}, {"evict_every": 16}, {"layer_budgets": FACTORS}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_is_sized_on_the_meta_device(make_llama, family, options):
    model = make_llama().float()
    if family == "gemma2":
        if "positions" in options:
            pytest.skip("has layers that slide")
        config = Gemma2Config(
            hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=97, head_dim=16, sliding_window=8,
            attn_implementation="h2o",
        )  # fmt: skip
        model = Gemma2ForCausalLM(config).eval()
    with torch.device("meta"):
        on_meta = type(model)(model.config).eval()
    on_meta.set_attn_implementation("h2o")
    sizes = []
    for each, device in ((model, "cpu"), (on_meta, "meta")):
        cache = cache_of(each.config, **options)
        with torch.no_grad():
            for length in (60, 1, 7, 1):
                logits = each(tokens(length, 2).to(device), **{CACHE: cache}).logits
                assert logits.shape == (2, length, 97)
                sizes.append((cache.nbytes, cache.full_nbytes, cache.num_seen_tokens))
        sizes.append([tuple(layer.keys.shape) for layer in cache.layers])
    if cache.cache_config.whole_prompts:  # whose slots grow until the first span has ended
        assert all(
            real[0] <= planned[0] for real, planned in zip(sizes[:4], sizes[5:9], strict=True)
        )
        return
    assert sizes[:5] == sizes[5:]


def test_what_cannot_be_done_on_the_meta_device(make_llama):
    model = make_llama()
    with torch.device("meta"):
        on_meta = LlamaForCausalLM(model.config).eval()
    on_meta.set_attn_implementation("h2o")
    cache = cache_of(model.config, **SMALL)
    assert h2okv.prefill(on_meta, tokens(30).to("meta"), cache).shape == (1, 97)
    sized = cache_of(model.config, **SMALL)
    on_meta.set_attn_implementation("sdpa")  # which a model that shares its config has changed
    on_meta(tokens(30).to("meta"), **{CACHE: sized})
    assert sized.nbytes == cache.nbytes > 0
    on_meta.set_attn_implementation("h2o")
    with pytest.raises(ValueError, match="sized on the meta device and holds no numbers"):
        model(tokens(3), **{CACHE: cache})
    with pytest.raises(ValueError, match="MaskedCache needs numbers"):
        on_meta(tokens(9).to("meta"), **{CACHE: cache_of(model.config, masks=True)})
