"""The tables in the pages equal the CSV files."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def tables(load_script):
    return load_script("docs/results/observations/tables.py")


PAGES = ("results/observations.md", "results/theory.md")


@pytest.mark.parametrize("page", PAGES)
def test_pages_match_the_csv_files(tables, page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert tables.filled(text) == text


def test_every_table_is_shown_once(tables):
    text = "".join((DOCS / page).read_text() for page in PAGES)
    assert sorted(re.findall(r"<!-- ([a-z-]+):start -->", text)) == sorted(tables.PARTS)
