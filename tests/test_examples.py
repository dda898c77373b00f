"""Every example runs as it stands, with the bundled model and with one that has a template."""

import runpy
from pathlib import Path

import pytest

from h2okv.integration.names import BUNDLED, PACKAGED, SMOLLM2

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples"
OF_SERVERS = ("agent_loop",)  # tests/server/test_tools.py
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in OF_SERVERS)


@pytest.mark.parametrize("model", [(), (BUNDLED,), (SMOLLM2,)], ids=["none", BUNDLED, SMOLLM2])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, model, capsys, monkeypatch, tmp_path):
    if SMOLLM2 in model and PACKAGED[SMOLLM2].find() is None:
        pytest.skip("SmolLM2 is not on this machine; h2okv models pull smollm2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path), *model])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert len(path.read_text().splitlines()) < 40


def test_examples_exist():
    assert len(EXAMPLES) >= 6
