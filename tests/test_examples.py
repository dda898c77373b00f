"""Every example runs as it stands, by public names, with SmolLM2 and with the bundled model."""

import runpy
from pathlib import Path

import pytest
from public_names import internals

from h2okv.cache.argument import CACHE
from h2okv.models.names import BUNDLED, PACKAGED, SMOLLM2

FOLDER = Path(__file__).parents[1] / "examples"
OF_SERVERS = ("agent_loop",)  # tests/server/test_tools.py
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in OF_SERVERS)


@pytest.mark.slow
@pytest.mark.skipif(CACHE != "cache", reason="transformers 5.24 named the argument `cache`")
@pytest.mark.parametrize("model", [(), (BUNDLED,)], ids=["none", BUNDLED])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, model, capsys, monkeypatch, tmp_path):
    if not model and PACKAGED[SMOLLM2].find() is None:
        pytest.skip("SmolLM2 is not on this machine; h2okv models pull smollm2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path), *model])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert len(path.read_text().splitlines()) < 40


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_uses_public_names_alone(path):
    assert internals(path.read_text(encoding="utf-8")) == []


def test_internals_are_found():
    text = "import h2okv\nfrom h2okv.assets import sample_article\nh2okv.load\nh2okv.cache.rope"
    assert internals(text) == ["h2okv.assets", "h2okv.cache"]
    assert internals("import h2okv.assets") == ["h2okv.assets"]


def test_examples_exist():
    assert len(EXAMPLES) >= 6
