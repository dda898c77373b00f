"""Budgets by head are measured in a process of their own, once for vLLM's model and version."""

import json
from types import SimpleNamespace

import pytest
import torch

from h2okv.assets import bundled_model_path
from h2okv.config import FACTORS_VERSION, CacheConfig
from h2okv.vllm_plugin import measure

BEST = CacheConfig("best", heavy=108, recent=20)


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Count the processes that measure; nothing is known of earlier ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counted, run, results = [], measure.subprocess.run, {}

    def count(*args, **options):
        counted.append(args)
        if options["input"] not in results:
            results[options["input"]] = run(*args, **options)
        return results[options["input"]]  # of the same model: what a second process prints

    monkeypatch.setattr(measure.subprocess, "run", count)
    return counted


def model(folder):
    return SimpleNamespace(model=str(folder), dtype=torch.float32, hf_config=SimpleNamespace())


def test_a_model_is_measured_once_for_each_version(processes, tmp_path, monkeypatch):
    config = measure.measured(BEST, model(bundled_model_path()))
    assert config.is_by_head and config.label == "best-v5:128"
    assert measure.measured(BEST, model(bundled_model_path())) == config
    other = CacheConfig("best", heavy=0.1, recent=0.02)  # of another budget
    assert measure.measured(other, model(bundled_model_path())).layer_budgets
    assert len(processes) == 1
    (file,) = (tmp_path / "h2okv" / "layer-budgets").glob("vllm-*.json")
    file.write_text("damaged")
    assert measure.measured(BEST, model(bundled_model_path())) == config
    assert len(processes) == 2 and json.loads(file.read_text())
    monkeypatch.setattr(measure, "FACTORS_VERSION", FACTORS_VERSION + 1)
    measure.measured(BEST, model(bundled_model_path()))
    assert len(processes) == 3


def test_budgets_are_even_where_the_model_cannot_be_read(processes, tmp_path, capfd):
    config = measure.measured(BEST, model(tmp_path))
    assert config.layer_budgets is None and len(processes) == 1
    assert "the model could not be measured" in capfd.readouterr().err
