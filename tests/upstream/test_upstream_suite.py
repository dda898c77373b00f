"""What the suite says of a family that it does not know; its own run is `make test-upstream`."""

import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).with_name("upstream_suite.py")


def test_an_unknown_family_is_refused_before_anything_is_downloaded():
    command = [sys.executable, SUITE, "llama", "lama"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "family 'lama' is unknown; did you mean llama" in done.stderr
