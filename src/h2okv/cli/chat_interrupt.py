"""Ctrl-C while an answer is made."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from torch import nn


class Interrupt:
    """Notes the first Ctrl-C and lets the second one strike.

    A `KeyboardInterrupt` in the middle of a forward would leave layers that have seen the token
    and layers that have not. So the first Ctrl-C only sets `requested`, which is looked at
    between two forwards; the second one, for a forward that takes too long, raises.

    Inside the ``with`` block SIGINT belongs to this object, except in another thread than the main
    one, and where whoever started the process had it ignore Ctrl-C.

    Args:
        module: The module whose forward must not be cut; gets two hooks inside the block.
    """

    def __init__(self, module: nn.Module) -> None:
        self.requested = False
        self.in_forward = False
        self._may_force = True
        self._module = module
        self._hooks: list[Any] = []
        self._before: Any = signal.getsignal(signal.SIGINT)
        # None: its handler was not set from Python and could not be given back.
        self._installs = (
            threading.current_thread() is threading.main_thread()
            and self._before not in (signal.SIG_IGN, None)
        )

    def __enter__(self) -> Interrupt:
        """Takes SIGINT over."""
        self._hooks = [
            self._module.register_forward_pre_hook(self._begin),
            self._module.register_forward_hook(self._end),
        ]
        if self._installs:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives SIGINT back."""
        for hook in self._hooks:
            hook.remove()
        if self._installs:
            signal.signal(signal.SIGINT, self._before)

    def settle(self) -> None:
        """Says that no forward will follow: what is left to do is short and must not be cut."""
        self._may_force = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self._may_force:
            raise KeyboardInterrupt
        self.requested = True

    def _begin(self, *_: Any) -> None:
        self.in_forward = True

    def _end(self, *_: Any) -> None:
        self.in_forward = False
