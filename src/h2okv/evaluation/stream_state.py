"""Where a stream stands: all that is needed to go on, except the cache itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from h2okv.evaluation.stream_record import Row

_KEY = "stream"
_VERSION = 1

Setting = str | int | float | None


@dataclass
class StreamState:
    """Where a stream stands between two blocks.

    Attributes:
        position: Tokens that have been through the cache.
        sample: The sample that is being read.
        piece: The piece of it that is being read.
        read: Tokens of that piece that have been read, the pending ones before it included.
        pending: The token before the piece, if it has not been through the cache yet.
        answer: What the model has answered to the piece so far; its last token is not read yet.
        total_nll: Sum over all tokens so far, in nats.
        nll: Sum over the tokens since the last row.
        count: How many these are.
        steps: Seconds of each block that was read since the last row.
        last_step: Seconds of the newest block.
        seconds: Time spent in forward passes.
        rows: The rows so far.
    """

    position: int = 0
    sample: int = 0
    piece: int = 0
    read: int = 0
    pending: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    total_nll: float = 0.0
    nll: float = 0.0
    count: int = 0
    steps: list[float] = field(default_factory=list)
    last_step: float = 0.0
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def to_notes(self, settings: Mapping[str, Setting]) -> dict[str, str]:
        """Writes the state down, floats to the last bit.

        Args:
            settings: What the stream runs with, to be held to when it goes on.

        Returns:
            Notes for `H2OCache.save`.
        """
        content = {"version": _VERSION, "settings": dict(settings), "state": asdict(self)}
        return {_KEY: json.dumps(content)}

    @classmethod
    def from_notes(
        cls, notes: Mapping[str, str], settings: Mapping[str, Setting], where: str
    ) -> StreamState:
        """Reads a state back.

        Args:
            notes: From a checkpoint.
            settings: What the stream is to run with now.
            where: The checkpoint's name, for messages.

        Returns:
            The state.

        Raises:
            ValueError: If the notes are not a stream's, or it ran with other settings.
        """
        if _KEY not in notes:
            raise ValueError(
                f"'{where}' holds a cache, but no stream to go on with; give a file that"
                " h2okv stream saved"
            )
        try:
            content: dict[str, Any] = json.loads(notes[_KEY])
            version = content["version"]
            if version == _VERSION:
                state = cls(**content["state"])
                state.rows = [Row(**row) for row in content["state"]["rows"]]
                saved = dict(content["settings"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"'{where}' is damaged; begin again without --resume") from error
        if version != _VERSION:
            raise ValueError(
                f"'{where}' is of version {version}, this h2okv reads {_VERSION}; begin again"
                " without --resume"
            )
        _check_settings(saved, settings, where)
        return state


def _check_settings(
    saved: Mapping[str, Setting], wanted: Mapping[str, Setting], where: str
) -> None:
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise ValueError(
                f"'{where}' was saved with {name} {saved.get(name)}, not {value}; resume with what"
                " it was begun with, or begin again without --resume"
            )
