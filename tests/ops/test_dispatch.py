"""What runs an operation, and that it makes no difference."""

import warnings

import pytest
import torch

import h2okv
from h2okv.ops import dispatch, triton_cut, triton_decode, triton_prefill

STEPS = 12


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch):
    monkeypatch.delenv("H2OKV_OPS")
    caches = dispatch._disagreement, dispatch._load_kernels
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@torch.no_grad()
def run(model, ids, implementation, **options):
    """Reads a prompt and goes on; the cache and all logits."""
    with dispatch.use(implementation):
        cache = h2okv.H2OCache(model.config, **{"heavy": 6, "recent": 5} | options)
        logits = [model(ids[:, :-STEPS], past_key_values=cache).logits]
        for at in range(ids.shape[1] - STEPS, ids.shape[1]):
            logits.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
    cache.check_integrity()
    return cache, torch.cat(logits, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "rolling", "sink": 2}, {"evict_every": 9}, {"heavy": 9, "recent": 20},
     {"policy": "sink_recent"}, {"policy": "full"}, {"scoring": "decay"}],
    ids=str,
)  # fmt: skip
def test_a_model_on_triton_kernels(make_llama, kept_sets, device, options):
    model = make_llama(heads=4, kv_heads=2).to(device, torch.float32)
    ids = torch.randint(2, 97, (2, 36), device=device)
    expected, expected_logits = run(model, ids, "plain", **options)
    cache, logits = run(model, ids, "triton", **options)
    assert {layer.slots.operations.name for layer in cache.layers} == {"triton"}
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
    assert kept_sets(cache) == kept_sets(expected)


@pytest.mark.slow
def test_a_padded_batch_on_triton_kernels(make_llama, kept_sets, device):
    model = make_llama(heads=4, kv_heads=2).to(device, torch.float32)
    ids = torch.randint(2, 97, (2, 30), device=device)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    texts, caches = [], []
    for implementation in ("plain", "triton"):
        with dispatch.use(implementation), h2okv.enable(model):
            cache = h2okv.H2OCache(model.config, heavy=0.2, recent=0.2, min_tokens=0)
            options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask}
            texts.append(model.generate(ids, past_key_values=cache, **options))
            caches.append(kept_sets(cache))
    assert torch.equal(*texts) and caches[0] == caches[1]


def test_the_environment_and_the_innermost_block_decide(monkeypatch):
    assert dispatch.implementation_in_use() == "auto"
    monkeypatch.setenv("H2OKV_OPS", "plain")
    assert dispatch.implementation_in_use() == "plain"
    with dispatch.use("triton"):
        with dispatch.use("auto"):
            assert dispatch.implementation_in_use() == "auto"
        assert dispatch.implementation_in_use() == "triton"
    assert dispatch.implementation_in_use() == "plain"


def test_an_implementation_that_does_not_exist(monkeypatch, make_llama):
    with pytest.raises(ValueError, match="ops='fast' is not an implementation; choose one of auto"):
        dispatch.use("fast").__enter__()
    with pytest.raises(ValueError, match="choose one of auto, plain, triton"):
        dispatch.use("compiled").__enter__()
    monkeypatch.setenv("H2OKV_OPS", "cuda")
    model = make_llama()
    cache = h2okv.H2OCache(model.config)
    with pytest.raises(ValueError, match="H2OKV_OPS='cuda' is not an implementation"):
        model(torch.ones(1, 9, dtype=torch.long), past_key_values=cache)


def test_a_cpu_needs_no_kernels(make_llama):
    chosen = dispatch.operations(torch.device("cpu"), torch.float32, 16, 16, 2)
    assert chosen.name == "plain" and chosen.why == "Triton has no kernels for cpu"


@pytest.mark.parametrize("fault", ["number", "error"])
@pytest.mark.parametrize("where", ["attend", "step", "cut"])
def test_kernels_that_disagree_are_not_used(monkeypatch, device, fault, where):
    module, name = triton_prefill, "attention_with_scores"
    if where == "step":
        module, name = triton_decode, "decode_step"
    elif where == "cut":
        module, name = triton_cut, "select"
    right = getattr(module, name)

    def wrong(*args, **options):
        if fault == "error":
            raise RuntimeError("PTX was compiled with an unsupported toolchain\nand more")
        result = right(*args, **options)
        if where == "cut":
            return result._replace(counts=result.counts - 1)
        return (result[0], 2 * result[1]) if where == "attend" else result + 1

    monkeypatch.setattr(module, name, wrong)
    arguments = device, torch.float32, 16, 16, 2, False, where == "step"
    text = "differ from plain PyTorch" if fault == "number" else "unsupported toolchain"
    with dispatch.use("triton"), pytest.raises(ValueError, match=text):
        dispatch.operations(*arguments)
    # On a GPU that was not chosen explicitly, the same is a warning and plain PyTorch.
    monkeypatch.setattr(dispatch, "_interprets", lambda: True)
    with pytest.warns(UserWarning, match=text):
        assert dispatch.operations(*arguments).name == "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dispatch.operations(*arguments).why
