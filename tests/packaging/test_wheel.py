import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LARGEST = 13_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize(
    "path",
    [
        "h2okv/py.typed", "h2okv/assets/sample_prompt.txt", "h2okv/assets/sample_chat.txt",
        "h2okv/assets/sample_code.txt", "h2okv/assets/sample_manual.txt", "h2okv/cli/help.md",
        "h2okv_lab/cli/help.md", "h2okv/assets/books-llama/config.json",
        "h2okv/assets/books-llama/model.safetensors", "h2okv/assets/books-llama/tokenizer.json",
        "h2okv_lab/analysis/report.html", "h2okv_lab/analysis/report.mplstyle",
        "h2okv_lab/analysis/sections.toml", "h2okv_lab/benchmarking/shapes.toml",
        "h2okv_lab/evaluation/experiments/figure4.yaml",
        "h2okv/integration/hub_recipe/custom_generate/generate.py",
        "h2okv-0.1.0.dist-info/licenses/LICENSE",
    ],
)  # fmt: skip
def test_holds(names, path):
    assert path in names


def test_holds_every_module_of_the_source(names):
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= names


def test_holds_nothing_but_the_package(names):
    folders = {"h2okv", "h2okv_lab", "h2okv-0.1.0.dist-info"}
    assert {name.split("/")[0] for name in names} == folders
    assert not [name for name in names if "__pycache__" in name]


def test_is_small(wheel):
    assert wheel.stat().st_size < LARGEST


def test_installs_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read("h2okv-0.1.0.dist-info/entry_points.txt").decode()
    assert "h2okv = h2okv.cli:main" in entry_points
