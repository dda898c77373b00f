import threading

import pytest
import torch
from safetensors.torch import save_file

from h2okv.offload.checkpoint import CheckpointFiles
from h2okv.offload.profile import Clock, Gemm, Slowdown, measure_bandwidth, measure_slowdown


def test_a_clock_runs_the_call_once():
    calls = []
    assert Clock(torch.device("cpu")).seconds(lambda: calls.append(1)) > 0
    assert calls == [1]


def test_bandwidth_is_a_positive_number():
    assert measure_bandwidth(torch.device("cpu"), 2**20) > 0


@pytest.mark.parametrize(
    ("slowdown", "reading", "computing", "seconds"),
    [
        (Slowdown(), 3.0, 2.0, 3.0),  # the longer of the two
        (Slowdown(2.0, 2.0), 1.0, 1.0, 2.0),  # as if one came after the other
        (Slowdown(1.0, 2.0), 1.0, 1.0, 1.5),  # half is computed while all is read
        (Slowdown(2.0, 1.0), 3.0, 1.0, 3.5),
        (Slowdown(2.0, 1.5), 0.0, 4.0, 4.0),
    ],
)
def test_what_reading_and_computing_take_at_once(slowdown, reading, computing, seconds):
    assert slowdown.together(reading, computing) == pytest.approx(seconds)


@pytest.fixture
def files(tmp_path):
    save_file({"weight": torch.ones(1 << 14)}, tmp_path / "model.safetensors")
    return CheckpointFiles.in_folder(tmp_path)


def test_a_slowdown_is_measured_and_the_reader_ends(files):
    before = threading.active_count()
    measured = measure_slowdown(
        files, 1 << 10, Gemm.make(32, 64, 1 << 20, torch.float32, torch.device("cpu"), 2)
    )
    assert min(measured) >= 1
    assert threading.active_count() == before


def test_a_reader_that_fails_says_why(files, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="has changed while the model ran"):
        measure_slowdown(
            files, 1 << 10, Gemm.make(32, 64, 1 << 20, torch.float32, torch.device("cpu"), 2)
        )


@pytest.mark.parametrize(("layers", "count"), [(3, 3), (1000, 85)])
def test_no_more_matrices_than_layers_or_room(layers, count):
    gemm = Gemm.make(32, 64, 85 * 3 * 32 * 64 * 4, torch.float32, torch.device("cpu"), layers)
    assert len(gemm.gate) == count
