import pytest
import torch
from safetensors.torch import save_file

from h2okv.offload import profile
from h2okv.offload.checkpoint import CheckpointFiles
from h2okv.offload.profile import Clock, measure_bandwidth, measure_disk, measure_gemm


def test_a_clock_runs_the_call_once():
    calls = []
    assert Clock(torch.device("cpu")).seconds(lambda: calls.append(1)) > 0
    assert calls == [1]


def test_bandwidth_is_a_positive_number():
    assert measure_bandwidth(torch.device("cpu"), 2**20) > 0


@pytest.fixture
def files(tmp_path):
    save_file({"weight": torch.ones(1 << 14)}, tmp_path / "model.safetensors")
    return CheckpointFiles.in_folder(tmp_path)


def test_a_disk_that_fails_says_why(files, tmp_path):
    assert measure_disk(files, 1 << 10) > 0
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="has changed while the model ran"):
        measure_disk(files, 1 << 10)


@pytest.mark.parametrize(("layers", "count"), [(3, 3), (1000, 85)])
def test_no_more_matrices_than_layers_or_room(monkeypatch, layers, count):
    calls, multiply = [], profile.linear
    monkeypatch.setattr(Clock, "samples", lambda self, call: [call() or 2.0])
    monkeypatch.setattr(profile, "linear", lambda *args: calls.append(1) or multiply(*args))
    room = 85 * 3 * 32 * 64 * 4
    rates = measure_gemm(32, 64, room, layers, torch.float32, torch.device("cpu"))
    assert len(calls) == 4 * 3 * count
    assert rates[1] == (8, 8 * count * 3 * 32 * 64)
