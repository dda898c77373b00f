"""Python processes that a benchmark starts import nothing from the folder it is called in."""

import subprocess

import pytest
import torch

from h2okv.benchmarking.caches import CacheSpec, PeakRun, PeakRunFailedError, measure_peak
from h2okv.benchmarking.serving import h2okv_server, transformers_server
from h2okv.engine.memory import peak_resident_bytes

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _a_folder_with_a_module_of_its_own(monkeypatch, tmp_path):
    (tmp_path / "stray.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "server",
    [h2okv_server("bundled"), transformers_server("folder", "float32", "cpu", None)],
    ids=lambda server: server.name,
)
def test_a_server(server):
    words = server.command[: server.command.index("-m") + 1]
    done = subprocess.run([*words, "stray"], capture_output=True, text=True)
    assert done.returncode == 1 and "No module named stray" in done.stderr


def test_a_run(source, monkeypatch):
    if peak_resident_bytes() is None:
        pytest.skip("this system does not tell a process's memory")
    monkeypatch.setattr("h2okv.benchmarking.caches._CHILD", "stray")
    run = PeakRun(source, torch.float32, torch.device("cpu"), 1, CacheSpec("dynamic"), 100, 1)
    with pytest.raises(PeakRunFailedError, match="No module named stray"):
        measure_peak(run)
