"""A job's prompts in a JSONL file, read one by one however large the file is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.engine.sequence import PromptId


@dataclass(frozen=True)
class PromptLine:
    """Where a prompt stands in the file.

    Attributes:
        id: The prompt's name.
        start: Of its line, in bytes from the beginning of the file.
        size: Of its line, in bytes.
        digest: A short name of the line's prompt.
    """

    id: PromptId
    start: int
    size: int
    digest: str


class PromptFile:
    """Lines ``{"id": ..., "prompt": ...}``, looked through once and then read where needed.

    Only the ids are kept in memory. A line is checked against what was there at first, so that a
    file that changes meanwhile is noticed.

    Args:
        path: The file.

    Raises:
        ValueError: If it cannot be read, has a line that is no such object, or an id twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = list(self._scan())
        if not self.lines:
            raise ValueError(
                f'\'{path}\' has no prompts; give lines such as {{"id": 1, "prompt": "..."}}'
            )

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, line: PromptLine) -> Any:
        """Reads a prompt.

        Args:
            line: One of `lines`.

        Returns:
            What stands under ``prompt``; for a prompt that is none, anything.

        Raises:
            ValueError: If the file is not what it was.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(line.start)
                _, prompt, digest = parse_line(file.read(line.size))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        except ValueError:
            digest = ""
        if digest != line.digest:
            raise ValueError(
                f"'{self.path}' has changed while it was read (id {json.dumps(line.id)}); leave it"
                " as it is during a job, and run the command again"
            )
        return prompt

    def _scan(self) -> Iterator[PromptLine]:
        known: dict[str, int] = {}
        start = 0
        try:
            with self.path.open("rb") as file:
                for number, data in enumerate(file, start=1):
                    if data.strip(b"\xef\xbb\xbf \t\r\n"):
                        try:
                            prompt_id, _, digest = parse_line(data)
                        except ValueError as error:
                            raise ValueError(f"'{self.path}', line {number}: {error}") from error
                        name = json.dumps(prompt_id)
                        if name in known:
                            raise ValueError(
                                f"'{self.path}', line {number}: id {name} is that of line"
                                f" {known[name]} too; give every prompt an id of its own"
                            )
                        known[name] = number
                        yield PromptLine(prompt_id, start, len(data), digest)
                    start += len(data)
        except OSError as error:
            raise _unreadable(self.path, error) from error


def parse_line(data: bytes) -> tuple[PromptId, Any, str]:
    """Takes a line apart.

    Args:
        data: The line, as it stands in the file.

    Returns:
        The id, the prompt (for a prompt that is none, anything), and the prompt's short name.

    Raises:
        ValueError: If it is no such object.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("this is not UTF-8 text; convert the file to UTF-8") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError('this is no JSON object; write {"id": 1, "prompt": "..."}')
    prompt_id = content.get("id")
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, (str, int)):
        raise ValueError(f"id {json.dumps(prompt_id)} is no name; give a text or a whole number")
    prompt = content.get("prompt")
    written = json.dumps(prompt, sort_keys=True).encode()
    return prompt_id, prompt, hashlib.sha256(written).hexdigest()[:16]


def _unreadable(path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(f"'{path}' cannot be read ({reason}); give a JSONL file with prompts")
