"""Scheduling: which requests are prefilled and decoded next."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from h2okv.engine.config import EngineConfig
from h2okv.engine.outputs import QueueFullError
from h2okv.engine.prefix_cache import PrefixCache
from h2okv.engine.request import Output, PrefillChunk, Request, ScheduledStep

_MIN_WAIT, _MAX_WAIT = 1.0, 60.0
"""Bounds of the wait, in seconds, that a refused client gets; the lower one before any request
has ended."""


class Scheduler:
    """First come, first served, with chunked prefill; ``running[i]`` has the i-th slots."""

    def __init__(
        self,
        config: EngineConfig,
        max_num_seqs: int,
        chunk_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.max_num_seqs, self.prefix_cache = max_num_seqs, prefix_cache
        self.dropped_states: list[str] = []  # with the next step
        self.running: list[Output] = []
        self.waiting: deque[Request] = deque()
        # Requests whose prompts are being prefilled, several if they fit into one chunk.
        self.prefilling: list[Request] = []
        self._chunk_tokens = chunk_tokens
        self._max_waiting = config.max_waiting
        self._decode_per_prefill = 1 / config.max_prefill_time_fraction - 1
        self._decode_debt = 0.0  # seconds of decode steps before the next chunk
        self._pace = 0.0  # seconds between two requests that end, smoothed
        self._last_end: float | None = None

    def submit(self, request: Request) -> None:
        """Append a request to the queue; raise QueueFullError if it is full."""
        rows = sum(each.num_seqs for each in self.prefilling) + len(self.running)
        num_waiting = 0
        for each in (*self.waiting, request):  # of which the first ones have slots already
            rows += each.num_seqs
            num_waiting += rows > self.max_num_seqs
        if num_waiting > self._max_waiting:
            wait = max(_MIN_WAIT, min(self._pace, _MAX_WAIT))
            raise QueueFullError(len(self.waiting), wait)
        self.waiting.append(request)

    def _has_slots(self, request: Request) -> bool:
        return len(self.running) + request.num_seqs <= self.max_num_seqs

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.running or self.waiting or self.prefilling)

    def drop(self, request: Request) -> None:
        """End a request, finished or not; its slots are released with the next step."""
        if not request.is_over:
            before, self._last_end = self._last_end, time.monotonic()
            if before is not None:
                self._pace += 0.2 * (self._last_end - before - self._pace)
        request.is_over = True
        if not request.num_prefilled and request in self.waiting:
            self.waiting.remove(request)

    def clear(self) -> list[Request]:
        """Remove and return all requests that have started."""
        started = dict.fromkeys([*(output.request for output in self.running), *self.prefilling])
        self.running, self.prefilling = [], []
        return list(started)

    def record_time(self, prefill: float, decode: float) -> None:
        """Record the seconds of a step's prefill and decoding."""
        paid = max(0.0, self._decode_debt - decode)
        self._decode_debt = paid + prefill * self._decode_per_prefill

    def split_prefill_batch(self) -> None:
        """Put prompts that failed together back, to be prefilled one by one."""
        for request in reversed(self.prefilling):
            request.is_alone, request.num_prefilled = True, 0
            if not request.is_over:
                self.waiting.appendleft(request)
        self.prefilling = []

    def schedule(self) -> ScheduledStep:
        """Return the next step, which the caller must run: the scheduler's state assumes it."""
        step = ScheduledStep(
            release=self._release(),
            admit=self._admit(),
            decode=tuple(output.tokens[-1] for output in self.running),
            positions=tuple(
                len(output.request.prompt) + len(output.tokens) - 1 for output in self.running
            ),
            offsets=self._offsets(),
            save=self._states_to_save(),
            prefill=self._next_chunks(),
        )
        if self.prefix_cache is not None and self.dropped_states:
            # A prompt may have brought one of them back.
            dropped = [key for key in self.dropped_states if key not in self.prefix_cache]
            step, self.dropped_states = replace(step, drop=tuple(dropped)), []
        return step

    def next_decode(self) -> ScheduledStep | None:
        """Return the step behind the one that runs, whose tokens the host has not read yet.

        ``None`` if these tokens, or what waits, may make it another step. A text that ends with
        one of them still takes the step; nothing reads what that adds.
        """
        outputs, cache = self.running, self.prefix_cache
        may_start = bool(self.waiting) and self._has_slots(self.waiting[0])
        if not outputs or self.prefilling or may_start or self.dropped_states:
            return None
        lengths = [len(output.request.prompt) + len(output.tokens) + 1 for output in outputs]
        for output, length in zip(outputs, lengths, strict=True):
            ends = len(output.tokens) + 1 >= output.request.max_new_tokens
            ends = ends or output.is_finished or output.request.is_over
            is_saved = cache is not None and length % cache.span == 0
            if ends or is_saved or not output.needs_no_host:
                return None
        positions = tuple(length - 1 for length in lengths)
        return ScheduledStep(positions=positions, offsets=self._offsets())

    def _offsets(self) -> tuple[int, ...]:
        offsets = tuple(output.request.position_offset for output in self.running)
        return offsets if any(offsets) else ()

    def _states_to_save(self) -> tuple[tuple[int, str], ...]:
        """Return the rows whose span the next decode step ends, with the keys of their states."""
        if self.prefix_cache is None:
            return ()
        saves = []
        for row, output in enumerate(self.running):
            request = output.request
            is_cut = (len(request.prompt) + len(output.tokens)) % self.prefix_cache.span == 0
            if is_cut and request.uses_prefix_cache and not output.has_thoughts:
                tokens = [*request.prompt, *output.tokens]
                keys = self.prefix_cache.keys_of(tokens, request.start.pins)
                saves.append((row, keys[-1]))
        return tuple(saves)

    def _release(self) -> tuple[int, ...]:
        released = []
        for number in reversed(range(len(self.running))):
            output = self.running[number]
            if output.is_finished or output.request.is_over:
                released.append(number)
                # Same order as the slots: the last row moves into the released one.
                self.running[number] = self.running[-1]
                self.running.pop()
        return tuple(released)

    def _admit(self) -> tuple[int, ...] | None:
        prompts = self.prefilling
        if not prompts or not all(request.is_over or request.is_prefilled for request in prompts):
            return None
        self.prefilling = []
        admitted: list[int] = []
        for number, request in enumerate(prompts):
            outputs = () if request.is_over else request.outputs
            unfinished = [output for output in outputs if not output.is_finished]
            self.running.extend(unfinished)
            admitted.extend([number] * len(unfinished))
        return tuple(admitted)

    def _next_chunks(self) -> tuple[PrefillChunk, ...]:
        if self.running and self._decode_debt > 0:
            return ()
        if not self.prefilling:
            if not self.waiting or not self._has_slots(self.waiting[0]):
                return ()
            self._begin()
        return tuple(self._chunk_of(request) for request in self.prefilling)

    def _begin(self) -> None:
        """Start the next request, and those after it that fit into the same forward."""
        first = self.waiting.popleft()
        self._find_state(first)
        self.prefilling = [first]
        width, seqs = len(first.prompt), len(self.running) + first.num_seqs
        while self.waiting and self._can_batch(first) and self._can_batch(self.waiting[0]):
            other = self.waiting[0]
            width, seqs = max(width, len(other.prompt)), seqs + other.num_seqs
            tokens = width * (len(self.prefilling) + 1)  # padding is computed too
            if tokens > self._chunk_tokens or seqs > self.max_num_seqs:
                return
            self.prefilling.append(self.waiting.popleft())

    def _can_batch(self, request: Request) -> bool:
        """Tell whether others may be prefilled with it: not if it may begin or leave a state."""
        cache = self.prefix_cache
        return request.can_batch and (cache is None or len(request.prompt) <= cache.span)

    def _find_state(self, request: Request) -> None:
        """Let a request continue from the longest state of its prompt; mutates the request."""
        if self.prefix_cache is not None and request.uses_prefix_cache:
            length, key, request.saves = self.prefix_cache.match(
                request.prompt, request.opening, request.start.pins
            )
            if length > request.start.num_reused:
                request.start = replace(request.start, state=key, num_reused=length)
        request.num_prefilled = request.start.num_reused

    def _chunk_of(self, request: Request) -> PrefillChunk:
        start = request.num_prefilled
        # Chunks end at multiples, wherever a saved state begins.
        offset = 0 if self.prefix_cache is None else start % self._chunk_tokens
        end = min(start - offset + self._chunk_tokens, len(request.prompt))
        if request.inputs:  # tokens of an image may see each other both ways
            end = len(request.prompt)
        end = request.num_prefilled = min([end, *(n for n in request.saves if n > start)])
        return PrefillChunk(
            tokens=request.prompt[start:end],
            position=start,
            is_last=request.is_prefilled,
            start=request.start if start == request.start.num_reused else None,
            wants_all_logits=request.params.prompt_logprobs is not None,
            save=request.saves.get(end),
            inputs=request.inputs,
        )
