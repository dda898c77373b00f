from dataclasses import replace

import pytest
import torch

from h2okv.config import CacheConfig
from h2okv_lab.benchmarking.caches import CacheSpec
from h2okv_lab.benchmarking.comparison import Comparison, Settings


def make(budgets=(0.25,), **options):
    defaults = {
        "contexts": (128,), "batches": (2,), "caches": ("dynamic", "h2o"),
        "configs": tuple(CacheConfig(budget=budget, min_tokens=0) for budget in budgets),
        "dtypes": (torch.float32,),
        "peak": False,
    }  # fmt: skip
    return Settings(**(defaults | options))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rounds": 0}, "--rounds 0"),
        ({"steps": 0}, "--steps 0"),
        ({"contexts": (4,)}, "--contexts 4"),
        ({"contexts": ()}, "--contexts must have at least one value"),
        ({"batches": (0,)}, "--batches 0"),
        ({"batches": (2, 2)}, "--batches must have each value once"),
        ({"budgets": ("full",)}, "--budget must not be full"),
        ({"budgets": ()}, "--budget must have at least one value"),
        ({"caches": ("dynamic", "magic")}, "'magic'"),
        ({"configs": (CacheConfig(positions="clamped"),)}, "'clamped'"),
        ({"configs": (CacheConfig(), CacheConfig(positions="rolling"))}, "positions must be"),
    ],
)
def test_invalid_bench_settings_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        make(**options)


def test_a_budget_is_split_in_two_and_counts_entries():
    quarter = CacheSpec("h2o", CacheConfig(budget=0.25, min_tokens=0))
    assert quarter.entries(128) == 32
    config = CacheConfig(budget=33)
    assert (config.heavy, config.recent) == (16, 17)
    assert CacheSpec("dynamic").entries(128) == 128
    assert quarter.label == "h2o:25%"


def test_every_budget_gets_its_own_caches():
    names = [c.label for c in make(budgets=(0.1, 64), caches=("h2o", "dynamic", "static")).specs()]
    assert names == ["dynamic", "h2o:10%", "static 10%", "h2o:64", "static 64"]


def test_unequal_budget_parts_are_in_the_label():
    configs = (CacheConfig(heavy=64, recent=128), CacheConfig(heavy=0.1, recent=64, sink=4))
    names = [spec.label for spec in make(configs=configs, caches=("h2o",)).specs()]
    assert names == ["h2o:64+128", "h2o:10%+64,sink=4"]


def test_bits_are_further_caches_of_each_budget():
    configs = tuple(CacheConfig.from_spec(f"h2o:10%,bits={n}", min_tokens=0) for n in (0, 8, 4))
    specs = make(configs=configs, caches=("dynamic", "static", "h2o")).specs()
    assert [spec.label for spec in specs] == [
        "dynamic", "static 10%", "h2o:10%", "h2o:10%,bits=8", "h2o:10%,bits=4",
    ]  # fmt: skip


def test_prompts_and_steps_must_fit_the_window():
    settings = make(contexts=(128,), rounds=2, steps=3)
    settings.check_window(136)
    settings.check_window(None)
    with pytest.raises(ValueError, match="window of 135"):
        settings.check_window(135)


@pytest.fixture
def bench(source, monkeypatch):
    def call(available=None, **options):
        monkeypatch.setattr(
            "h2okv_lab.benchmarking.comparison.available_bytes", lambda _: available
        )
        return Comparison(source, make(**options), torch.float32, torch.device("cpu"))

    return call


def test_memory_is_counted_before_anything_is_allocated(bench):
    comparison = bench()
    needed = comparison.needed_bytes(comparison.settings, 2, 128)
    caches = 2 * 128 * 512 + 2 * 33 * (512 + 32)
    assert needed == comparison.footprint.weight_bytes + caches + 2 * 128 * (64 + 2 * 96) * 4
    bench(available=needed)
    with pytest.raises(ValueError, match=f"{needed} bytes .* {needed - 1} bytes"):
        bench(available=needed - 1)


def test_needed_bytes_count_the_weights_of_a_second_process(bench):
    comparison = bench(contexts=(8,), batches=(1,))
    alone, separate = (
        comparison.needed_bytes(replace(comparison.settings, peak=peak), 1, 8)
        for peak in (False, True)
    )
    assert separate > 2 * comparison.footprint.weight_bytes > alone
    gpu = replace(comparison, device=torch.device("cuda"))
    assert gpu.needed_bytes(replace(comparison.settings, peak=True), 1, 8) == alone
