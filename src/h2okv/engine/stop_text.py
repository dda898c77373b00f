"""Text that ends where a stop string begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopText:
    """Hands text on up to the first stop string, and never a part of one.

    Args:
        stop_strings: What ends the text; none for no end.
        write: Takes each piece.
        strips_start: Whether white space before the first word is left out.

    Attributes:
        stopped: The stop string that ended the text; ``None`` until one did.
        text: What was handed on.
    """

    def __init__(
        self,
        stop_strings: Sequence[str],
        write: Callable[[str], None],
        strips_start: bool = True,
    ) -> None:
        self.stopped: str | None = None
        self.text = ""
        self._stop_strings = stop_strings
        self._write = write
        self._strips_start = strips_start
        self._held = ""

    def add(self, piece: str) -> None:
        """Takes the next piece; does nothing after a stop string."""
        if self.stopped is not None:
            return
        self._held += piece
        places = ((self._held.find(stop), -len(stop), stop) for stop in self._stop_strings)
        found = [place for place in places if place[0] >= 0]
        if found:
            # Of those that begin at one place the longest, whatever their order.
            at, _, self.stopped = min(found)
            self._hand_on(at)
            return
        self._hand_on(len(self._held) - self._begun())

    def end(self) -> None:
        """Hands on what was held back, for no stop string came of it."""
        if self.stopped is None:
            self._hand_on(len(self._held))

    def _begun(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        longest = 0
        for stop in self._stop_strings:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _hand_on(self, length: int) -> None:
        piece, self._held = self._held[:length], self._held[length:]
        if self._strips_start and not self.text:
            piece = piece.lstrip()
        if piece:
            self.text += piece
            self._write(piece)
