"""How a stream is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamSettings:
    """How a stream is read.

    Attributes:
        chunk: Tokens of a block of given text; 1 is the paper's Algorithm 1.
        every: Tokens between two rows.
        tokens: Where to stop; None for the source's end.
        max_new_tokens: The most tokens of an answer.
    """

    chunk: int = 64
    every: int = 1000
    tokens: int | None = None
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        """Refuses what no stream can be read with."""
        for name in ("chunk", "every", "tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {value} is too few; give 1 or more")
