"""Python processes that a benchmark starts import nothing from the folder it is called in."""

import pytest
import torch

from h2okv.engine.memory import peak_resident_bytes
from h2okv_lab.benchmarking.caches import CacheSpec, PeakRun, PeakRunFailedError, measure_peak

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _a_folder_with_a_module_of_its_own(monkeypatch, tmp_path):
    (tmp_path / "stray.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "imported").exists()


def test_a_run(source, monkeypatch):
    if peak_resident_bytes() is None:
        pytest.skip("this system does not tell a process's memory")
    monkeypatch.setattr("h2okv_lab.benchmarking.caches._CHILD", "stray")
    run = PeakRun(source, torch.float32, torch.device("cpu"), 1, CacheSpec("dynamic"), 100, 1)
    with pytest.raises(PeakRunFailedError, match="No module named stray"):
        measure_peak(run)
