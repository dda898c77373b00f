"""A job's prompts as a source for Ray Data, read on the machine that has the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from h2okv.engine.prompt_file import PromptLine

if TYPE_CHECKING:
    from ray.data.context import DataContext

COLUMN = "line"
"""Of a block: a line of the prompts' file, as bytes."""


class PromptSource(Datasource):
    """Lines of a file, so many to a block, each block read when there is an actor for it.

    What travels with a read task are places in the file, 12 bytes for a prompt; the file itself is
    only opened on the driver's machine.

    Args:
        path: The prompts' file.
        lines: The prompts that are to be read.
        rows: Prompts of a block.
    """

    def __init__(self, path: Path, lines: Sequence[PromptLine], rows: int) -> None:
        super().__init__()
        self._path = path.resolve()
        self._starts = np.array([line.start for line in lines], dtype=np.int64)
        self._sizes = np.array([line.size for line in lines], dtype=np.int32)
        self._rows = rows

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return -(-len(self._starts) // self._rows)

    @property
    def supports_distributed_reads(self) -> bool:
        """Other machines need not have the file."""
        return False

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all lines."""
        return int(self._sizes.sum())

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Makes a task for each block; its size is ours, whatever Ray Data asks for."""
        tasks = []
        for first in range(0, len(self._starts), self._rows):
            starts = self._starts[first : first + self._rows]
            sizes = self._sizes[first : first + self._rows]
            metadata = BlockMetadata(
                num_rows=len(starts),
                size_bytes=int(sizes.sum()),
                exec_stats=None,
                input_files=None,
            )
            read = _reader(str(self._path), starts, sizes)
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _reader(path: str, starts: np.ndarray, sizes: np.ndarray) -> Callable[[], Iterator[Any]]:
    def read() -> Iterator[pyarrow.Table]:
        lines = []
        with open(path, "rb") as file:
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                file.seek(start)
                lines.append(file.read(size))
        yield pyarrow.table({COLUMN: pyarrow.array(lines, type=pyarrow.binary())})

    return read
