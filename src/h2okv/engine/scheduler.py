"""Which sequences are prefilled and which decode next."""

from __future__ import annotations

import time
from collections import deque

from h2okv.engine.outputs import QueueFullError
from h2okv.engine.request import Output, Plan, PromptPiece, Request, Wanted

_RETRY_SECONDS = 1.0
"""What a refused client is told to wait before anything is known about the pace."""


class Scheduler:
    """First come, first served; prompts are read piece by piece between steps of the others.

    Knows rows by their number only: row i of the block belongs to ``rows[i]``.

    Attributes:
        rows: Outputs that take steps.
        waiting: Requests that have not begun.
        reading: The request whose prompt is under way, or read and about to join; several whose
            prompts together are not longer than a piece.
    """

    def __init__(
        self, num_rows: int, piece_tokens: int, max_waiting: int, prompt_share: float
    ) -> None:
        self.num_rows = num_rows
        self.rows: list[Output] = []
        self.waiting: deque[Request] = deque()
        self.reading: list[Request] = []
        self._piece_tokens = piece_tokens
        self._max_waiting = max_waiting
        self._steps_for_prompts = (1 - prompt_share) / prompt_share
        self._owed = 0.0  # seconds of steps before the next piece
        self._is_forgotten = True  # whether the worker holds no prompt
        self._pace = 0.0  # seconds between two requests that end, smoothed
        self._last_end: float | None = None

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        if len(self.waiting) >= self._max_waiting and not self._has_room_for(request):
            raise QueueFullError(len(self.waiting), self.expected_wait())
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Puts a request at the end of the queue, whatever its length."""
        self.waiting.append(request)

    def _has_room_for(self, request: Request) -> bool:
        """Whether a request would begin at once."""
        is_free = not self.reading and not self.waiting
        return is_free and len(self.rows) + request.num_rows <= self.num_rows

    def expected_wait(self) -> float:
        """Seconds until a place in the queue is likely to be free, at the pace of late."""
        return max(_RETRY_SECONDS, min(self._pace, 60.0))

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.rows or self.waiting or self.reading)

    def drop(self, request: Request) -> None:
        """Forgets a request, finished or not; its rows are given back with the next plan."""
        if not request.is_over:
            now = time.monotonic()
            if self._last_end is not None:
                self._pace += 0.2 * (now - self._last_end - self._pace)
            self._last_end = now
        request.is_over = True
        if request in self.waiting:
            self.waiting.remove(request)

    def clear(self) -> list[Request]:
        """Forgets all that has begun; returns it."""
        begun = {id(own.request): own.request for own in self.rows}
        begun.update((id(own), own) for own in self.reading)
        self.rows, self.reading, self._is_forgotten = [], [], True
        return list(begun.values())

    def spent(self, piece: float, step: float) -> None:
        """Takes note of the time that a plan took."""
        self._owed = max(0.0, self._owed - step) + piece * self._steps_for_prompts

    def plan(self) -> Plan:
        """Decides what is done next; what it says has to be done."""
        leave = self._leave()
        join, forget = self._join()
        pieces = self._next_pieces()
        return Plan(
            leave=leave,
            join=join,
            forget=forget,
            decode=tuple(own.tokens[-1] for own in self.rows),
            positions=tuple(len(own.request.prompt) + len(own.tokens) - 1 for own in self.rows),
            pieces=pieces,
        )

    def _leave(self) -> tuple[int, ...]:
        left = []
        row = 0
        while row < len(self.rows):
            own = self.rows[row]
            if own.finish_reason is not None or own.request.is_over:
                left.append(row)
                # As the block does it: the last one takes the place.
                self.rows[row] = self.rows[-1]
                self.rows.pop()
            else:
                row += 1
        return tuple(left)

    def read_apart(self) -> None:
        """Puts prompts that could not be read together back, to be read one by one."""
        for request in reversed(self.reading):
            request.is_alone, request.num_read = True, 0
            if not request.is_over:
                self.waiting.appendleft(request)
        self.reading, self._is_forgotten = [], True

    def _join(self) -> tuple[tuple[int, ...], bool]:
        """Which of the prompts that have been read take rows, and whether they are done with."""
        if not self.reading:
            return (), False
        if not all(own.is_over or own.is_read for own in self.reading):
            return (), False
        join = []
        for number, request in enumerate(self.reading):
            going_on = [own for own in request.outputs if own.finish_reason is None]
            if not request.is_over:
                self.rows.extend(going_on)
                join.extend([number] * len(going_on))
        self.reading = []
        forget, self._is_forgotten = not self._is_forgotten, True
        return tuple(join), forget

    def _next_pieces(self) -> tuple[PromptPiece, ...]:
        if not self.reading:
            if not self.waiting:
                return ()
            if len(self.rows) + self.waiting[0].num_rows > self.num_rows:
                return ()
        if self.rows and self._owed > 0:
            return ()
        if not self.reading:
            self._begin()
        self._is_forgotten = False
        return tuple(self._piece_of(request) for request in self.reading)

    def _begin(self) -> None:
        """Takes the next request, and those after it that can be read in the same forward."""
        first = self.waiting.popleft()
        first.num_read = first.num_reused
        self.reading = [first]
        width, rows = len(first.prompt), len(self.rows) + first.num_rows
        while self.waiting and first.is_short and self.waiting[0].is_short:
            other = self.waiting[0]
            width, rows = max(width, len(other.prompt)), rows + other.num_rows
            # Padding is read too.
            if width * (len(self.reading) + 1) > self._piece_tokens or rows > self.num_rows:
                return
            self.reading.append(self.waiting.popleft())

    def _piece_of(self, request: Request) -> PromptPiece:
        at = request.num_read
        end = min(at + self._piece_tokens, len(request.prompt))
        request.num_read = end
        wanted = Wanted.NONE
        if request.params.prompt_logprobs is not None:
            wanted = Wanted.ALL
        elif end == len(request.prompt):
            wanted = Wanted.LAST
        return PromptPiece(
            tokens=request.prompt[at:end],
            position=at,
            goes_on=end < len(request.prompt),
            start=request.start if at == request.num_reused else None,
            wanted=wanted,
        )
