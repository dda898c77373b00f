"""Lets the tests of this folder import their table: pytest's importlib mode adds no folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
