"""Half precision, inference mode, and models that are spread over devices."""

from contextlib import nullcontext

import pytest
import torch
from oracle import cache_of
from transformers import AutoModelForCausalLM, DynamicCache

PROMPT = 40
SMALL = {"heavy": 5, "recent": 4}
LARGE = {"heavy": PROMPT, "recent": PROMPT}


def _tokens(length: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))


def _forced_logits(model, cache, modes=(torch.no_grad,)) -> torch.Tensor:
    """Read a prompt, single tokens, a second turn; each block in the next mode of ``modes``."""
    ids, logits, start = _tokens(), [], 0
    for step, size in enumerate((26, 1, 1, 1, 7, 1, 1, 2)):
        with modes[step % len(modes)]():
            block = ids[:, start : start + size]
            logits.append(model(block, past_key_values=cache).logits.clone())
        start += size
    return torch.cat([block.detach() for block in logits], dim=1)


@pytest.mark.parametrize("masks", [False, True], ids=["dropping", "masking"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_in_every_dtype_is_no_larger_than_that_of_sdpa(make_llama, dtype, masks):
    """Compare with float64: with a large budget H2O differs by the model's rounding only."""
    truth = _forced_logits(make_llama(attention="sdpa").double(), DynamicCache())
    plain = _forced_logits(make_llama(attention="sdpa").to(dtype), DynamicCache())
    model = make_llama().to(dtype)
    cache = cache_of(model.config, **LARGE, masks=masks)
    logits = _forced_logits(model, cache)
    cache.check_integrity()
    error, plain_error = ((x.double() - truth).abs().mean() for x in (logits, plain))
    assert error <= 1.25 * plain_error
    assert cache.scores(0).dtype == torch.float32
    assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_are_summed_in_fp32(make_llama, dtype):
    """Sum many scores: a sum in half precision would stop growing: 256 + 1 is 256 in bf16."""
    model = make_llama().to(dtype)
    cache = cache_of(model.config, heavy=20, recent=20, policy="full")
    ids = _tokens(450)
    with torch.no_grad():
        model(ids[:, :400], past_key_values=cache)
        for at in range(400, 450):
            model(ids[:, at : at + 1], past_key_values=cache)
    for layer in range(2):
        # Each query head of each token gives away a probability of one.
        total = cache.scores(layer).double().sum(dim=-1)
        torch.testing.assert_close(total, torch.full_like(total, 2 * 450.0), atol=0.05, rtol=0)


@pytest.mark.parametrize("budget", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("masks", [False, True], ids=["dropping", "masking"])
@pytest.mark.parametrize(
    "modes",
    [(torch.inference_mode,), (torch.inference_mode, torch.no_grad),
     (torch.no_grad, torch.inference_mode), (torch.inference_mode, nullcontext),
     (nullcontext, torch.inference_mode, torch.no_grad)],
    ids=lambda modes: "-".join(mode.__name__ for mode in modes),
)  # fmt: skip
def test_modes_may_be_mixed(make_llama, modes, masks, budget):
    model = make_llama()
    expected = _forced_logits(model, cache_of(model.config, **budget, masks=masks))
    cache = cache_of(model.config, **budget, masks=masks)
    logits = _forced_logits(model, cache, modes)
    cache.check_integrity()
    assert torch.equal(logits, expected)
    with torch.no_grad():
        cache.reorder_cache(torch.tensor([1, 1]))
        model(_tokens(1), past_key_values=cache)
    cache.check_integrity()


@pytest.fixture(scope="module")
def checkpoint(make_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_llama(layers=3).save_pretrained(folder)
    return folder


_OUTSIDE = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
_OUTSIDE |= {"model.rotary_emb": "cpu"}
DEVICE_MAPS = {
    "one": {"": "cpu"},
    "disk": _OUTSIDE
    | {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"},
    "gpu": {key: 0 for key in _OUTSIDE}
    | {"model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": 0},
}


@pytest.mark.parametrize("budget", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", DEVICE_MAPS)
def test_device_map(checkpoint, tmp_path, kind, budget):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    if kind == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="h2o")
    spread = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        attn_implementation="h2o",
        device_map=DEVICE_MAPS[kind],
        offload_folder=tmp_path if kind == "disk" else None,
    )
    ids = _tokens()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    logits_by_map = {}
    for name, model in (("whole", loaded), ("spread", spread)):
        cache = cache_of(model.config, **budget)
        device = model.get_input_embeddings().weight.device
        device = "cpu" if device.type == "meta" else device
        output = model.generate(
            ids.to(device), attention_mask=mask.to(device), past_key_values=cache,
            max_new_tokens=10, do_sample=False, num_beams=2,
        )  # fmt: skip
        cache.check_integrity()
        logits_by_map[name] = output.cpu()
        if name == "spread" and kind == "gpu":
            assert len({layer.keys.device for layer in cache.layers}) == 2
    assert torch.equal(logits_by_map["spread"], logits_by_map["whole"])
