"""What one request was, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

INTERRUPTED = "interrupted"
"""The error of a request that was under way when the measurement was stopped."""


@dataclass(frozen=True)
class LoadRequest:
    """What a client asks for.

    Attributes:
        number: Which request of the workload it is.
        prompt: A text, or the tokens themselves.
        max_tokens: The most new tokens.
    """

    number: int
    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass
class Outcome:
    """What became of a request; times are seconds on the clock of `time.perf_counter`.

    Attributes:
        due: When it was to be sent: a client of an open loop that comes late must not look fast.
        started: When it was sent.
        arrivals: When each piece with new text (or tokens) came.
        ended: When it was over.
        prompt_tokens: Tokens of the prompt, if told.
        new_tokens: New tokens, if told; otherwise pieces are counted.
        token_ids: The new tokens themselves, if told.
        error: What went wrong, in two words, the same for the same kind; ``None`` if nothing.
        message: What was said about it.
    """

    due: float
    started: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    token_ids: list[int] | None = None
    error: str | None = None
    message: str = ""

    @property
    def tokens(self) -> int:
        """New tokens: as told, otherwise as many as pieces came."""
        return len(self.arrivals) if self.new_tokens is None else self.new_tokens

    @property
    def lateness(self) -> float:
        """Seconds by which it was sent later than it was due."""
        return self.started - self.due

    @property
    def first_token(self) -> float | None:
        """Seconds from when it was due to its first text; ``None`` if none came."""
        return self.arrivals[0] - self.due if self.arrivals else None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first one; ``None`` if there is none."""
        if len(self.arrivals) < 2 or self.tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]
