"""A model on the disk is measured as in memory, and finds what was measured there."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.calibration import factors, layer_budgets
from h2okv.calibration.layer_budgets import Weights
from h2okv.config import CacheConfig
from h2okv.offload import offload_engine, tiers
from h2okv.offload.checkpoint import open_checkpoint, open_converted
from h2okv.offload.profile import HardwareProfile

sys.path.insert(0, str(Path(__file__).parent.parent / "families"))
from family_table import FAMILIES, config_options  # noqa: E402

CPU = torch.device("cpu")
NAMES = (
    "OPT", "LLaMA 1, LLaMA 2", "GPT-NeoX, Pythia", "Mixtral", "Qwen2-MoE", "Qwen3-Next", "Gemma 2",
    "Gemma 3 (text)", "Phi-3, Phi-4", "GPT-2", "LFM2",
)  # fmt: skip
SHARE = (0.2,)


def save_family(name, folder, dtype=torch.float32):
    (family,) = [family for family in FAMILIES if family.name == name]
    heads = (family.kv_heads or (None,))[-1]
    config = AutoConfig.for_model(family.model_type, **config_options(family, heads))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).eval().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def opened(folder):
    return open_checkpoint(AutoConfig.from_pretrained(folder), folder, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_families_are_measured_as_in_memory(tmp_path, name):
    model = save_family(name, tmp_path)
    torch.manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (1, 150))
    expected = factors.measure_shares(model, ids, SHARE)
    meta, files = opened(tmp_path)
    before = tiers.weights_in_files(meta, files)
    if not files.parameters:
        files = open_converted(meta, files, tmp_path / "copy")
    streaming = tiers.StreamingModel(meta, files, CPU)
    weights, in_memory = streaming.weights(), Weights.of(model)
    assert weights.is_complete and weights.prints == in_memory.prints
    assert before.match(in_memory.prints) and weights.pass_seconds > 0
    assert factors.measure_shares(streaming.model, ids, SHARE) == expected
    for unit in meta.units:
        assert all(slot.owner.get_parameter(slot.attribute).is_meta for slot in unit.slots)


@pytest.fixture
def best(monkeypatch, tmp_path):
    """Count the measurements of a model; nothing is known of earlier ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(layer_budgets, "_UNSAVED", [])
    monkeypatch.setattr(layer_budgets, "_REFUSED", set())
    calls, run = [], layer_budgets.measure_shares

    def count(model, *args, **options):
        calls.append(type(model).__name__)
        return run(model, *args, **options)

    monkeypatch.setattr(layer_budgets, "measure_shares", count)
    return SimpleNamespace(calls=calls, config=CacheConfig("best", 0.17, 0.03))


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs a batch job on the bundled model; returns its texts and its cache."""
    rates = HardwareProfile(1e9, 1e10, 1e10, ((1, 1e10), (256, 2e11)))
    monkeypatch.setattr(offload_engine, "measure_hardware", lambda *_: rates)  # which takes seconds
    prompts = tmp_path / "in.jsonl"
    text = sample_prompt()
    lines = [{"id": n, "prompt": text[100 * n : 700 + 300 * n]} for n in range(4)]
    prompts.write_text("\n".join(map(json.dumps, lines)))

    def run(config, weights, name, source=prompts, **options):
        output = tmp_path / f"{name}.jsonl"
        request = offload_engine.BatchRequest(
            model=str(bundled_model_path()), device=CPU, cache=config, dtype=torch.float32,
            weight_placement={weights: 1.0}, input=source, output=output, is_raw=True,
            sampling=h2okv.SamplingParams(max_tokens=16, temperature=0), **options,
        )  # fmt: skip
        offload_engine.run(request)
        settings = json.loads((tmp_path / f"{name}.jsonl.job.json").read_text())
        records = map(json.loads, output.read_text().splitlines())
        return {record["id"]: record["text"] for record in records}, settings

    return run


@pytest.mark.parametrize("order", [("device", "disk"), ("disk", "device")])
def test_a_job_from_the_disk_has_the_shares_and_texts_of_one_in_memory(best, job, order, tmp_path):
    texts, settings = zip(*(job(best.config, tier, tier) for tier in order), strict=True)
    assert texts[0] == texts[1] and len(best.calls) == 1
    assert settings[0]["layer_budgets"] == settings[1]["layer_budgets"] and settings[0]["measured"]
    even, _ = job(replace(best.config, layer_budgets=None), "device", "even")
    assert even != texts[0]  # otherwise the texts above would show nothing
    assert len(list((tmp_path / "cache" / "h2okv" / "layer-budgets").iterdir())) == 1


def test_a_job_that_was_begun_in_memory_goes_on_from_the_disk(best, job, tmp_path):
    expected, _ = job(best.config, "device", "whole")
    first = tmp_path / "first.jsonl"
    first.write_text("\n".join((tmp_path / "in.jsonl").read_text().splitlines()[:2]))
    job(best.config, "device", "part", first)
    assert job(best.config, "disk", "part")[0] == expected and len(best.calls) == 1


def test_a_memory_limit_that_leaves_no_room_is_kept(best, job, monkeypatch, capsys):
    monkeypatch.setattr(offload_engine, "bytes_while_streaming", lambda meta: 1 << 50)
    limit = (offload_engine.process.data_bytes() or 0) + (2 << 30)
    _, settings = job(best.config, "disk", "limited", memory=limit)
    error = capsys.readouterr().err
    assert "--memory leaves less than the 1024.0 TiB that measuring takes; to measure it" in error
    assert settings["layer_budgets"] is None and best.calls == []
    job(best.config, "device", "measured")
    _, settings = job(best.config, "disk", "found", memory=limit)
    assert settings["measured"] and len(best.calls) == 1


def test_a_job_on_a_cluster_uses_what_was_measured(best, job, monkeypatch, capsys):
    described = offload_engine.describe(str(bundled_model_path()))
    request = offload_engine.OffloadRequest(model=described.name, device=CPU, cache=best.config)
    even = offload_engine._budgets_from_files(request, described, measures=False)
    assert even.layer_budgets is None and "was not measured yet" in capsys.readouterr().err
    shares = offload_engine.measure(request, described)
    cache = offload_engine._budgets_from_files(request, described, measures=False)
    assert cache.layer_budgets == shares.factors(0.17, by_head=True)


def test_a_model_that_does_not_fit_is_measured_on_request(best, monkeypatch, tmp_path):
    monkeypatch.setattr(offload_engine, "_fits_in_memory", lambda *args: False)
    monkeypatch.setattr(layer_budgets, "expected_seconds", lambda model: 1e6)
    described = offload_engine.describe(str(bundled_model_path()))
    request = offload_engine.OffloadRequest(model=described.name, device=CPU)
    shares = offload_engine.measure(request, described)
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path()).eval()
    cache = h2okv.H2OCache(model, policy="best", heavy=0.17, recent=0.03)
    assert cache.cache_config.layer_budgets == shares.factors(0.17, by_head=True)
    assert len(best.calls) == 1
