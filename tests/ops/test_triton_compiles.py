"""Kernels that run in Python may still not compile: here they do, for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("compile_kernels.py")
SMALLEST = 99 << 10
"""Bytes of shared memory that a program can have on cards from the RTX 30 series on."""


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_every_kernel_compiles_and_fits(architecture, tmp_path):
    surroundings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    surroundings.pop("TRITON_INTERPRET", None)
    process = subprocess.run(
        [sys.executable, str(SCRIPT), architecture],
        env=surroundings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    names = {"_attend", "_finish", "_forward", "_sums", "_rotate", "_select", "_move", "_join"}
    assert {kernel["kernel"] for kernel in kernels} == names
    assert [kernel for kernel in kernels if kernel["shared"] > SMALLEST] == []
