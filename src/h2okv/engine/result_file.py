"""A job's results in a JSONL file that survives being killed at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from h2okv.engine.prompt_file import PromptLine

_SETTINGS_SUFFIX = ".job.json"
Setting = str | int | float | None


class ResultFile:
    """One line for each finished prompt, on the disk before the job goes on.

    The job's settings stand in a file beside it, so that results of two jobs do not mix. A line
    that was torn by a kill is dropped when the file is opened again.

    Args:
        path: The file; made if it is not there.
        settings: What the job's results depend on.

    Raises:
        ValueError: If the file cannot be written, or holds something else than results of a job
            with the same settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Setting]) -> None:
        self.path = path
        self.settings_path = path.with_name(path.name + _SETTINGS_SUFFIX)
        self.finished: dict[str, str] = {}
        self.num_errors = 0
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._size = self._read_finished()
            if self._size:
                self._check_settings(settings)
            os.ftruncate(self._descriptor, self._size)
            if not self._size:
                self._write_settings(settings)
        except OSError as error:
            self.close()
            raise _unwritable(path, error) from error
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> ResultFile:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; everything in it is on the disk already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def check_prompts(self, lines: Sequence[PromptLine]) -> None:
        """Refuses results that are of other prompts.

        Args:
            lines: The job's prompts.

        Raises:
            ValueError: If a finished id has another prompt now, or is not in the job.
        """
        digests = {json.dumps(line.id): line.digest for line in lines}
        for name, digest in self.finished.items():
            if name not in digests:
                raise ValueError(
                    f"'{self.path}' has a result for id {name}, which is not in the input; give"
                    " another --output, or the input that it was begun with"
                )
            if digests[name] != digest:
                raise ValueError(
                    f"'{self.path}' has a result for another prompt with id {name}; give another"
                    " --output, or the input that it was begun with"
                )

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds results; they are on the disk when it returns.

        Args:
            records: With ``id`` and ``prompt_digest`` each.

        Raises:
            ValueError: If they cannot be written; the file then is as before.
        """
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        # Half of a pair of surrogates, which a tokenizer may give, is no UTF-8.
        encoded = data.encode("utf-8", errors="replace")
        try:
            written = 0
            while written < len(encoded):
                written += os.pwrite(
                    self._descriptor, memoryview(encoded)[written:], self._size + written
                )
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise _unwritable(self.path, error) from error
        self._size += len(encoded)
        for record in records:
            self.finished[json.dumps(record["id"])] = record["prompt_digest"]
            self.num_errors += "error" in record

    def _read_finished(self) -> int:
        """Notes the results that are there; returns their bytes, a torn last line left out."""
        size = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    break
                try:
                    record = json.loads(data)
                    name, digest = json.dumps(record["id"]), record["prompt_digest"]
                except (ValueError, TypeError, KeyError):
                    raise ValueError(
                        f"'{self.path}', line {number}, is no result of h2okv batch; give another"
                        " --output"
                    ) from None
                self.finished[name] = digest
                self.num_errors += "error" in record
                size += len(data)
            else:
                return size
            if not size and not self.settings_path.exists():
                # Nothing says that this text is ours to cut off.
                raise ValueError(
                    f"'{self.path}' is no result of h2okv batch; give another --output"
                )
        return size

    def _check_settings(self, settings: Mapping[str, Setting]) -> None:
        try:
            saved = json.loads(self.settings_path.read_text(encoding="utf-8"))
            before = dict(saved)
        except (OSError, ValueError, TypeError):
            raise ValueError(
                f"'{self.path}' has results, but '{self.settings_path.name}' beside it, which says"
                " what made them, cannot be read; give another --output"
            ) from None
        for name, value in settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"'{self.path}' was begun with {name} {before.get(name)}, not {value}; go on"
                    " with what it was begun with, or give another --output"
                )

    def _write_settings(self, settings: Mapping[str, Setting]) -> None:
        """Puts the settings on the disk, at once or not at all, before the first result."""
        draft = self.settings_path.with_name(self.settings_path.name + ".tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps(dict(settings), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.settings_path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _unwritable(path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(
        f"'{path}' cannot be written ({reason}); what was finished before is kept, and the same"
        " command goes on from there when there is room, or choose another --output"
    )
