from contextlib import contextmanager

import pytest
import torch

import h2okv_lab.benchmarking.caches as caches
from h2okv.config import CacheConfig
from h2okv_lab.benchmarking.comparison import COLUMNS, Comparison, Settings
from h2okv_lab.benchmarking.model import ModelSource, speedup_limit

CONTEXT, BATCH, BANDWIDTH = 100, 2, 1e9


@pytest.fixture
def compare(source, build, monkeypatch):
    model = build()
    monkeypatch.setattr(ModelSource, "build", lambda *_: model)

    def call(**options):
        defaults = {
            "contexts": (CONTEXT,), "batches": (BATCH,), "configs": (CacheConfig(min_tokens=0),),
            "caches": ("dynamic", "static", "h2o"), "dtypes": (torch.float32,), "rounds": 2,
            "steps": 2, "peak": False,
        }  # fmt: skip
        settings = Settings(**(defaults | options))
        reports = []
        comparison = Comparison(source, settings, torch.float32, torch.device("cpu"))
        rows = list(comparison.rows(lambda done, _: reports.append(done), BANDWIDTH))
        assert sum(reports) == comparison.num_units
        by_key = {(row["cache"], row["context"], row["batch"]): row for row in rows}
        return by_key, comparison.footprint

    return call


def test_the_figures_follow_from_the_samples(compare):
    rows, footprint = compare()
    full, static, h2o = (rows[name, CONTEXT, BATCH] for name in ("dynamic", "static", "h2o"))
    weights = footprint.step_weight_bytes
    assert full["limit"] == full["share"] == full["speedup"] == 1
    assert h2o["limit"] == speedup_limit(weights, 2 * 100 * 512, 2 * 20 * (512 + 32))
    assert h2o["share"] == h2o["speedup"] / h2o["limit"]
    assert h2o["step_bytes"] == weights + 2 * 20 * (512 + 32)
    assert h2o["achieved"] == pytest.approx(h2o["step_bytes"] / h2o["decode"])
    assert h2o["tokens_per_second"] == pytest.approx(BATCH / h2o["decode"])
    assert h2o["entries"] == static["entries"] == 20
    assert h2o["cache_bytes"] == 2 * 21 * (512 + 32)
    assert static["prefill"] is None and static["prefill_ratio"] is None
    assert h2o["prefill_ratio"] is not None
    assert h2o["bandwidth"] == BANDWIDTH


@pytest.mark.slow
def test_every_combination_has_its_rows(compare):
    rows, _ = compare(contexts=(32, 64), batches=(1, 2), caches=("dynamic", "h2o"))
    expected = {(n, c, b) for n in ("dynamic", "h2o") for c in (32, 64) for b in (1, 2)}
    assert rows.keys() == expected


@pytest.mark.slow
def test_without_the_full_cache_there_is_no_ratio(compare):
    rows, _ = compare(caches=("h2o",))
    row = rows["h2o", CONTEXT, BATCH]
    assert row["speedup"] is None and row["share"] is None and row["limit"] > 1


@pytest.mark.slow
def test_cells_have_the_columns(compare):
    rows, _ = compare(caches=("h2o",), rounds=1)
    cells = rows["h2o", CONTEXT, BATCH]
    assert tuple(cells) == COLUMNS
    assert cells["decode"] == cells["decode_lower"] == cells["decode_upper"] > 0
    assert cells["speedup"] is None


def test_a_missing_cache_gets_a_row_without_figures(compare, monkeypatch):
    monkeypatch.setattr(caches, "is_optimum_quanto_available", lambda: False)
    monkeypatch.setattr(caches, "is_hqq_available", lambda: False)
    rows, _ = compare(caches=("dynamic", "quantized"))
    row = rows["quantized", CONTEXT, BATCH]
    assert row["status"].startswith("not installed") and row["decode"] is None


def test_a_failure_in_another_package_ends_that_cache_alone(compare, monkeypatch):
    def fail(self, context):
        raise RuntimeError("their\nbug")

    monkeypatch.setattr(caches.RUNNERS["quantized"], "obstacle", classmethod(lambda cls: None))
    monkeypatch.setattr(caches.RUNNERS["quantized"], "new_cache", fail)
    rows, _ = compare(caches=("dynamic", "quantized", "h2o"))
    row = rows["quantized", CONTEXT, BATCH]
    assert row["status"] == "failed: RuntimeError: their bug" and row["decode"] is None
    assert rows["h2o", CONTEXT, BATCH]["speedup"] is not None


def test_a_failure_in_h2o_is_raised(compare, monkeypatch):
    def fail(self, context):
        raise RuntimeError("our bug")

    monkeypatch.setattr(caches.RUNNERS["h2o"], "new_cache", fail)
    with pytest.raises(RuntimeError, match="our bug"):
        compare()


def test_steps_on_slots_are_compiled_on_request(compare, monkeypatch):
    entered = []

    @contextmanager
    def enable(model, *, compile):
        entered.append(compile)
        model.set_attn_implementation("h2o")
        yield model

    # Compiling takes long; that it works is the business of tests/integration/test_compiled.py.
    monkeypatch.setattr(caches.h2okv, "enable", enable)
    rows, _ = compare(caches=("dynamic", "h2o"), compiled=True)
    assert entered == [True, True]
    assert (
        rows["h2o", CONTEXT, BATCH]["compiled"] and not rows["dynamic", CONTEXT, BATCH]["compiled"]
    )


@pytest.mark.slow
def test_rolling_positions_are_measured(compare):
    rows, _ = compare(
        caches=("dynamic", "h2o"), configs=(CacheConfig(budget=0.25, positions="rolling"),)
    )
    assert rows["h2o", CONTEXT, BATCH]["positions"] == "rolling"
