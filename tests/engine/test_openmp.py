"""A thread's OpenMP workers end when it asks for it, and come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a separate process: here, threads of other tests start and end.
SCRIPT = """
import os
import torch
from h2okv.engine.memory import release_workers

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
work = torch.ones(64, 1 << 16)
expected = work.softmax(-1)
before = threads()
print(release_workers(), before - threads())
assert torch.equal(work.softmax(-1), expected)
print(threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted on Linux")
def test_openmp_workers_end_and_restart():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "3"},
    )
    assert done.stdout.split() == ["True", "2", "0"]
