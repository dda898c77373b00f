"""The tables in the pages equal the CSV files."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables():
    if not DOCS.is_dir():
        pytest.skip("the pages are not beside these tests")
    spec = importlib.util.spec_from_file_location(
        "observation_tables", DOCS / "results" / "observations" / "tables.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = ("results/observations.md", "results/theory.md")


@pytest.mark.parametrize("page", PAGES)
def test_pages_match_the_csv_files(tables, page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert tables.filled(text) == text


def test_every_table_is_shown_once(tables):
    text = "".join((DOCS / page).read_text() for page in PAGES)
    assert sorted(re.findall(r"<!-- ([a-z-]+):start -->", text)) == sorted(tables.PARTS)
