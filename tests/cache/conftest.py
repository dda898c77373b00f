"""Lets the tests of this folder share how the oracle is run: importlib mode adds no folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _exact_fractions(request, monkeypatch):
    """Let fractions of short texts be exact here; `test_constructor` tests the floor."""
    if request.path.stem != "test_constructor":
        monkeypatch.setattr("h2okv.config.LEAST_ENTRIES", 0)
