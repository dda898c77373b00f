import pytest
import torch

import h2okv.cache.layer as cache_layer
import h2okv.ops.append as append
import h2okv.ops.decode as step
from h2okv_lab.benchmarking import comparison
from h2okv_lab.benchmarking.comparison import CheckFailedError, check_h2o


@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_cache_passes(build, dtype, positions):
    check = check_h2o(build(dtype), positions=positions)
    assert check["full_error"] < 0.05
    assert (check["drop_error"] is None) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("kv_bits", [8, 6, 4])
def test_quantized_caches_have_their_own_tolerance(build, kv_bits):
    assert check_h2o(build(torch.bfloat16), kv_bits=kv_bits)["full_error"] < 0.05


def test_a_deep_model_may_round_as_much_as_full_attention_does(build, monkeypatch):
    monkeypatch.setattr(comparison, "_LARGEST_ERROR", (1e-3, 0.0))
    assert check_h2o(build(torch.bfloat16))["full_error"] > 0


@pytest.mark.parametrize(
    ("factor", "words"), [(1.5, "differs from full attention"), (float("nan"), "nan")]
)
def test_a_wrong_output_fails(build, monkeypatch, factor, words):
    right = step.decode_with_scores

    def louder(*args, **options):
        output, sums = right(*args, **options)
        return factor * output, sums

    for operation in (step, append):
        monkeypatch.setattr(operation, "decode_with_scores", louder)
    with pytest.raises(CheckFailedError, match=words):
        check_h2o(build())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_evictions_fail(build, monkeypatch, dtype):
    right = cache_layer.choose

    def upside_down(priority, *args):
        return right(-priority, *args)

    monkeypatch.setattr(cache_layer, "choose", upside_down)
    with pytest.raises(CheckFailedError, match="keeps other entries"):
        check_h2o(build(dtype))
