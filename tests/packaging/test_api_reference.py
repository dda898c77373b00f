import importlib.util
from pathlib import Path

import pytest

import h2okv

SCRIPT = Path(__file__).parents[2] / "scripts" / "api_reference.py"


@pytest.fixture(scope="module")
def reference():
    if not SCRIPT.is_file():
        pytest.skip("the script is not beside these tests")
    spec = importlib.util.spec_from_file_location("api_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_docstrings_say(reference):
    text = reference.PAGE.read_text(encoding="utf-8")
    assert text == reference.page(), "run python scripts/api_reference.py"


def test_every_public_name_has_an_entry_with_its_arguments(reference):
    page = reference.page()
    assert all(f"\n## `{name}`\n" in page for name in h2okv.__all__)
    assert "- `heavy`: " in page and "### `H2OCache.kept_positions`" in page
