"""Every example runs as it stands, with nothing but the package and SmolLM2."""

import runpy
from pathlib import Path

import pytest

from h2okv.integration.names import PACKAGED, SMOLLM2

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys, monkeypatch, tmp_path):
    if SMOLLM2 in path.read_text() and PACKAGED[SMOLLM2].find() is None:
        pytest.skip("SmolLM2 is not on this machine; h2okv models pull smollm2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert len(path.read_text().splitlines()) < 40


def test_most_examples_take_an_instruct_model():
    asked = [path for path in EXAMPLES if SMOLLM2 in path.read_text()]
    assert len(EXAMPLES) >= 6 and len(asked) >= 4
