"""A few prompts in memory, and their results: what an actor gets of a job, and gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2okv.engine.prompt_file import PromptLine, parse_line


class PromptList:
    """Prompts that came as lines of a file.

    Args:
        data: The lines.

    Raises:
        ValueError: If one is no prompt, which can only be if the file has changed.
    """

    def __init__(self, data: Sequence[bytes]) -> None:
        parsed = [parse_line(line) for line in data]
        self._prompts = [prompt for _, prompt, _ in parsed]
        self.lines = [
            PromptLine(prompt_id, index, len(data[index]), digest)
            for index, (prompt_id, _, digest) in enumerate(parsed)
        ]

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, line: PromptLine) -> Any:
        """Returns a prompt.

        Args:
            line: One of `lines`; here its start is a number in the list.
        """
        return self._prompts[line.start]


class ResultList:
    """Results that go elsewhere to be written."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.finished: dict[str, str] = {}
        self.num_errors = 0

    def check_prompts(self, lines: Sequence[PromptLine]) -> None:
        """Refuses nothing: there is no result yet."""

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds results."""
        self.records.extend(records)
        self.num_errors += sum("error" in record for record in records)
