from types import SimpleNamespace

import pytest
import torch

import h2okv_lab.benchmarking.comparison as module
from h2okv.config import CacheConfig
from h2okv.engine.memory import peak_resident_bytes
from h2okv_lab.benchmarking.caches import CacheSpec, Peak, PeakRun, PeakRunFailedError, measure_peak
from h2okv_lab.benchmarking.comparison import MAX_BATCH_COLUMNS, BatchMemory, MaxBatch, Settings
from h2okv_lab.benchmarking.model import Footprint, ModelSource

pytestmark = pytest.mark.slow

CONTEXT = 100
FULL, OWN = CONTEXT * 512, 21 * (512 + 32)
RUNTIME, CONSTANT, ACTIVATION = 5000, 300, 20_000


def test_batch_memory_from_peaks():
    loaded = 1000 + RUNTIME
    each = 700 + ACTIVATION
    peaks = {batch: Peak(loaded, loaded + CONSTANT + batch * each) for batch in (1, 2)}
    memory = BatchMemory.of_peaks(1000, 700, peaks)
    assert memory == BatchMemory(1000, RUNTIME, CONSTANT, 700, ACTIVATION)
    assert memory.bytes(3) == 1000 + RUNTIME + CONSTANT + 3 * each
    assert memory.largest_batch(memory.bytes(7)) == 7
    assert memory.largest_batch(memory.bytes(7) - 1) == 6
    assert memory.largest_batch(100) == 0


def test_negative_noise_is_clamped_to_zero():
    memory = BatchMemory.of_peaks(1000, 700, {1: Peak(900, 1500), 2: Peak(900, 1600)})
    assert (memory.runtime, memory.activation) == (0, 0)


@pytest.fixture
def find(source, build, monkeypatch):
    """Find batches with peaks that follow a formula, which gives the right answer."""

    def call(batch_of_full, surplus=0, limit=64, failing=None):
        weights = Footprint(source.config(), torch.float32).weight_bytes

        def peak(run, model):
            if failing == run.batch:
                raise PeakRunFailedError(run, "ended")
            cache = FULL if run.spec.name == "dynamic" else OWN
            need = CONSTANT + run.batch * (cache + ACTIVATION)
            extra = surplus if run.batch > 2 else 0
            return Peak(weights + RUNTIME, weights + RUNTIME + need + extra)

        monkeypatch.setattr(module, "measure_peak", peak)
        fixed = weights + RUNTIME + CONSTANT
        memory = fixed + batch_of_full * (FULL + ACTIVATION)
        settings = Settings(
            (CONTEXT,), (1,), (CacheConfig(min_tokens=0),), ("dynamic",), (torch.float32,),
            rounds=1, steps=1,
        )  # fmt: skip
        device, model = torch.device("cpu"), build()
        monkeypatch.setattr(ModelSource, "build", lambda *_: model)
        finder = MaxBatch(source, settings, torch.float32, device, memory, limit)
        rows = finder.rows(lambda *_: None, 1e9)
        return {f"{row['cache']}{row['kv_bits'] or ''}": row for row in rows}

    return call


def test_the_largest_batches_by_hand(find):
    rows = find(4)
    assert rows["dynamic"]["max_batch"] == rows["dynamic"]["run_batch"] == 4
    assert rows["h2o"]["max_batch"] == 4 * (FULL + ACTIVATION) // (OWN + ACTIVATION)
    for row in rows.values():
        assert row["is_verified"] and row["peak_bytes"] <= row["memory_bytes"]
        assert row["tokens_per_second"] == pytest.approx(row["run_batch"] / row["decode"])
        assert tuple(row) == MAX_BATCH_COLUMNS
    ratio = rows["h2o"]["tokens_per_second"] / rows["dynamic"]["tokens_per_second"]
    assert rows["h2o"]["throughput_ratio"] == pytest.approx(ratio)
    assert rows["dynamic"]["throughput_ratio"] == 1


def test_a_batch_that_needs_more_than_predicted_is_corrected(find):
    row = find(8, surplus=FULL + ACTIVATION)["dynamic"]
    assert row["max_batch"] == 7 and row["is_verified"]


def test_a_batch_that_needs_less_than_predicted_is_corrected(find):
    row = find(8, surplus=-(FULL + ACTIVATION))["dynamic"]
    assert row["max_batch"] == 9 and row["is_verified"]


def test_max_run_batch_limits_the_timed_batch(find):
    row = find(4, limit=3)["dynamic"]
    assert (row["max_batch"], row["run_batch"], row["is_verified"]) == (4, 3, False)


def test_a_run_that_ends_early_verifies_nothing(find):
    row = find(4, failing=4)["dynamic"]
    assert row["max_batch"] == 4 and not row["is_verified"]


def test_a_memory_below_one_sequence_gives_batch_0(find):
    rows = find(0)
    assert rows["dynamic"]["max_batch"] == 0 and rows["dynamic"]["decode"] is None
    assert rows["h2o"]["throughput_ratio"] is None


def test_a_real_process_reports_its_peak(source):
    if peak_resident_bytes() is None:
        pytest.skip("this system does not tell a process's memory")
    choice = CacheSpec("h2o", CacheConfig(min_tokens=0))
    run = PeakRun(source, torch.float32, torch.device("cpu"), 1, choice, CONTEXT, 3)
    peak = measure_peak(run)
    assert peak.peak >= peak.loaded > Footprint(source.config(), torch.float32).weight_bytes


def test_a_batch_too_large_for_a_gpu_is_a_run_that_failed(source, monkeypatch):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("h2okv_lab.benchmarking.caches._run", run_out)
    monkeypatch.setattr("h2okv_lab.benchmarking.caches.input_device", lambda model: model.device)
    for name in ("empty_cache", "reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    run = PeakRun(source, torch.float32, torch.device("cuda"), 1, CacheSpec("dynamic"), CONTEXT, 1)
    with pytest.raises(PeakRunFailedError, match="dynamic: OutOfMemoryError: CUDA out of memory"):
        measure_peak(run, SimpleNamespace(device=run.device))


def test_a_process_that_fails_says_why(source, monkeypatch):
    if peak_resident_bytes() is None:
        pytest.skip("this system does not tell a process's memory")
    # A process that ends before it has imported torch, for the test's sake.
    monkeypatch.setattr("h2okv_lab.benchmarking.caches._CHILD", "no_such_module")
    run = PeakRun(source, torch.float32, torch.device("cpu"), 1, CacheSpec("dynamic"), CONTEXT, 1)
    with pytest.raises(PeakRunFailedError, match="dynamic: .*no_such_module"):
        measure_peak(run)
