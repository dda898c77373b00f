"""A thread's OpenMP workers end when it asks for it, and come back."""

import os
import threading
from pathlib import Path

import pytest
import torch

from h2okv.engine.memory import release_workers


def count_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted on Linux")
def test_workers_end_and_come_back(three_threads):
    counts = []

    def compute():
        torch.set_num_threads(3)
        work = torch.ones(64, 1 << 16)
        expected = work.softmax(-1)
        counts.append(count_threads())
        assert release_workers()
        counts.append(count_threads())
        assert torch.equal(work.softmax(-1), expected)
        counts.append(count_threads())

    # In a thread of its own, whose workers are nobody else's.
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert [count - counts[0] for count in counts] == [0, -2, 0]
