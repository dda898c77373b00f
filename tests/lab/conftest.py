"""Folders of task files of lm-evaluation-harness and their data."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def add_task_files():
    """Return a function that copies the task files of ``benchmarks/`` into a folder of data."""
    tasks = Path(__file__).resolve().parents[2] / "benchmarks" / "tasks"
    if not tasks.is_dir():
        pytest.skip("the benchmarks are not beside these tests")

    def add(folder):
        for file in (*tasks.glob("*.yaml"), tasks / "tasks.py"):
            shutil.copy(file, folder)
        return folder

    return add


@pytest.fixture
def published_data(shared, add_task_files, tmp_path):
    """Return a folder of the published data files and the task files that read them."""
    folder = tmp_path / "published"
    folder.mkdir()
    for path in (shared / "data" / "eval").iterdir():
        (folder / path.name).symlink_to(path)
    return add_task_files(folder)
