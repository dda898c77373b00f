"""Why a request gets no output."""

from __future__ import annotations


class QueueFullError(RuntimeError):
    """As many requests wait as may.

    Attributes:
        retry_after: Seconds after which there is probably room.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting, which is the limit; try again in {retry_after:.0f} s."
        )
        self.retry_after = retry_after


class RequestFailedError(RuntimeError):
    """Something went wrong with this request alone, such as logits that are not numbers."""


class EngineStoppedError(RuntimeError):
    """The engine is shutting down, or has stopped by an error of its own."""


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the model or the engine takes."""
