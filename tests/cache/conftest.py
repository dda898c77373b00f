"""Lets the tests of this folder share how the oracle is run: importlib mode adds no folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
