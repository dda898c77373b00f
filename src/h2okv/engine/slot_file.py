"""One file without a name for the entries of caches; it is gone when the process is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any


class SlotFile:
    """Regions of a file, taken and given back.

    Args:
        folder: Where there is room.

    Raises:
        ValueError: If no file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            # Open as long as this object is.
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"no file for the cache can be made in '{folder}' ({error.strerror}); give another"
                " --cache-folder"
            ) from error
        self._end = 0
        self._free: list[tuple[int, int]] = []
        self.bytes_read = 0
        self.bytes_written = 0

    def take(self, size: int) -> int:
        """Takes a region.

        Args:
            size: In bytes.

        Returns:
            Where it begins.
        """
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[index] = (start + size, room - size)
                return start
        start, self._end = self._end, self._end + size
        return start

    def give_back(self, start: int, size: int) -> None:
        """Gives a region back.

        Args:
            start: Where it begins.
            size: In bytes.
        """
        regions = sorted([*(own for own in self._free if own[1]), (start, size)])
        merged: list[tuple[int, int]] = []
        for begin, room in regions:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((begin, room))
        self._free = merged

    def read(self, start: int, target: memoryview) -> None:
        """Reads into memory.

        Args:
            start: Where.
            target: Mutated.

        Raises:
            ValueError: If the file cannot be read.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._file.fileno(), [target[done:]], start + done)
            except OSError as error:
                raise ValueError(f"the cache's file cannot be read ({error.strerror})") from error
            if count == 0:
                raise ValueError("the cache's file is shorter than what was written to it")
            done += count
        self.bytes_read += done

    def write(self, start: int, source: memoryview) -> None:
        """Writes from memory.

        Args:
            start: Where.
            source: What.

        Raises:
            ValueError: If there is no room.
        """
        done = 0
        try:
            while done < len(source):
                done += os.pwrite(self._file.fileno(), source[done:], start + done)
        except OSError as error:
            raise ValueError(
                f"the cache's file in '{self._folder}' cannot grow ({error.strerror}); what was"
                " finished is kept, so give another --cache-folder or a smaller --batch and run"
                " the command again"
            ) from error
        self.bytes_written += done

    def close(self) -> None:
        """Lets the file go."""
        self._file.close()
