"""What the model does next: numbers only, so that a plan can be sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Wanted(Enum):
    """Which logits of a piece of a prompt are asked for."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True)
class PromptStart:
    """How a prompt begins.

    Attributes:
        length: Tokens of all its pieces.
        budget: ``(heavy, recent, sink)`` of its own; ``None`` for the engine's.
        prefix: The saved prefix that it goes on from; ``None`` for none.
    """

    length: int
    budget: tuple[int | float, int | float, int] | None = None
    prefix: int | None = None


@dataclass(frozen=True)
class PromptPiece:
    """Some tokens of the prompt under way.

    Attributes:
        tokens: One or more.
        position: Of the first one, in the whole text.
        goes_on: Whether more of the prompt follows.
        start: With the first piece.
        wanted: Which logits.
    """

    tokens: tuple[int, ...]
    position: int
    goes_on: bool
    start: PromptStart | None = None
    wanted: Wanted = Wanted.NONE


@dataclass(frozen=True)
class Plan:
    """One step of the engine, in the order of the attributes.

    Attributes:
        leave: Rows to give back, one after the other; the last row takes each one's place.
        join: How many rows get a copy of the prompt that has been read.
        forget: Whether the prompt that was read, or is under way, is dropped (after joining).
        decode: The newest token of each row in use; empty for no decode step.
        positions: Theirs, in their texts.
        piece: What is read of a prompt.
    """

    leave: tuple[int, ...] = ()
    join: int = 0
    forget: bool = False
    decode: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    piece: PromptPiece | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        nothing = not self.leave and not self.decode and self.piece is None
        return nothing and not self.join and not self.forget
