"""Ctrl-C as a request that a long run hears when it can be stopped without harm."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Turns the first Ctrl-C into a flag; a second one interrupts at once, as always.

    An interrupt in the middle of a forward pass leaves a cache in which some layers have read more
    than others; such a cache cannot be gone on with.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        # Python lets only the main thread have signal handlers.
        self._installs = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopSignal:
        """Begins to listen."""
        if self._installs:
            self._before = signal.getsignal(signal.SIGINT)
            # Who started this process may have had it ignore Ctrl-C (a job in the background).
            if self._before != signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives Ctrl-C its usual meaning back."""
        if self._installs and self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
