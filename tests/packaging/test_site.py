"""The site: its navigation has every page, its API page every public name."""

import re
from pathlib import Path

import pytest
import yaml

import h2okv

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "mkdocs.yml"
GENERATED = {"index.md", "live.md"}  # scripts/site.py

pytestmark = pytest.mark.skipif(not SETTINGS.is_file(), reason="mkdocs.yml is not here")


def listed(entry) -> list[str]:
    """Return the pages of an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in listed(value)]


def test_navigation_lists_every_page_once():
    text = SETTINGS.read_text(encoding="utf-8")
    pages = listed(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    expected = {page.name for page in (ROOT / "docs").glob("*.md")} | GENERATED
    assert sorted(pages) == sorted(expected), "list the page in mkdocs.yml (nav)"


def test_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: h2okv\.(\w+)$", text, re.MULTILINE)) == sorted(h2okv.__all__)
