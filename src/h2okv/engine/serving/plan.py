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
        join: Of the prompts that have been read, the number of each one that gets a row; several
            times for several outputs.
        forget: Whether the prompts that were read, or are under way, are dropped (after joining).
        decode: The newest token of each row in use; empty for no decode step.
        positions: Theirs, in their texts.
        pieces: What is read: a piece of one prompt, or several whole prompts with one budget.
    """

    leave: tuple[int, ...] = ()
    join: tuple[int, ...] = ()
    forget: bool = False
    decode: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    pieces: tuple[PromptPiece, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        nothing = not self.leave and not self.decode and not self.pieces
        return nothing and not self.join and not self.forget
