"""The notebook runs top to bottom, and its stored outputs are small and name no machine."""

import json
import re
from pathlib import Path

import pytest
from public_names import internals

from h2okv.models import loading as models
from h2okv.models.names import PACKAGED, SMOLLM2

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
LARGEST = 60_000  # bytes

pytestmark = pytest.mark.skipif(not NOTEBOOK.is_file(), reason="the notebook is not here")


@pytest.fixture
def runner(load_script):
    return load_script("scripts/run_notebook.py")


def test_stored_outputs_are_of_one_run_small_and_name_no_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert len(text.encode()) < LARGEST
    assert not re.search(r"/(home|root|Users|tmp|work)/", text)


def test_its_cells_use_public_names_alone():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert internals("\n".join(code)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bundled", SMOLLM2])
def test_it_runs(runner, monkeypatch, name):
    if name == SMOLLM2 and PACKAGED[SMOLLM2].find() is None:
        pytest.skip("SmolLM2 is not on this machine; h2okv models pull smollm2")
    find = models.find_model

    def find_one(requested):
        if name != SMOLLM2 and requested == SMOLLM2:
            raise ValueError("not pulled")
        return find(requested)

    monkeypatch.setattr(models, "find_model", find_one)
    notebook = runner.run(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(outputs)
    html = "".join(outputs[3][-1]["data"]["text/html"])
    assert html.count("<span") == html.count("</span>") > 3
    assert "100%" in "".join(outputs[2][0]["text"])  # the full cache agrees with itself


def test_the_runner_stores_what_a_cell_prints_and_its_result(runner):
    cell = {"cell_type": "code", "source": ["print('a')\n", "b = 1 + 1\n", "b"]}
    (done,) = runner.run({"cells": [cell]})["cells"]
    assert done["outputs"][0]["text"] == ["a\n"] and done["execution_count"] == 1
    assert done["outputs"][1]["data"] == {"text/plain": ["2"]}
