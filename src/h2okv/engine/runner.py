"""The loop of a job: prompts in, finished sequences out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.engine.chooser import Chooser
from h2okv.engine.joining import can_join, join
from h2okv.engine.micro_batch import MicroBatch
from h2okv.engine.passing import Passing
from h2okv.engine.sequence import Sequence

_AHEAD = 8
"""Batches of prompts that are sorted by length together, so that little is padded."""
_REFILL = 4
"""New prompts come in when this share of a batch is free: a quarter."""


@dataclass(frozen=True)
class Limits:
    """What is in memory at once.

    Attributes:
        rows: Sequences under way.
        prompt_tokens: Tokens, padding included, of the prompts that one micro-batch reads; at
            least one prompt is read whatever its length.
        decode_rows: Sequences that are decoded together.
        pass_tokens: Tokens of the prompts that one pass reads; ``None`` for no limit. At least one
            prompt is read.
        cache_bytes: For all caches; ``None`` for no limit. At least one sequence is under way.
        bytes_of: Of one sequence's cache, from the tokens of its prompt and its text.
    """

    rows: int
    prompt_tokens: int
    decode_rows: int
    pass_tokens: int | None = None
    cache_bytes: int | None = None
    bytes_of: Callable[[int, int], int] = lambda prompt, new: 0


class Runner:
    """Reads prompts in micro-batches, joins them, and decodes them together.

    Args:
        model: With H2O attention.
        passing: Brings the weights, and runs the forwards of all micro-batches.
        chooser: Chooses the tokens.
        make_cache: Makes an empty cache.
        limits: What is in memory at once.
        device: Where the model's input goes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        passing: Passing,
        chooser: Chooser,
        make_cache: Callable[[], H2OCache],
        limits: Limits,
        device: torch.device,
    ) -> None:
        self._model = model
        self._passing = passing
        self._chooser = chooser
        self._make_cache = make_cache
        self._limits = limits
        self._device = device
        self._batches: list[MicroBatch] = []
        self._is_filling = False
        """Whether there is room for prompts that the last pass could not take too."""
        self.num_passes = 0
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        """Tokens generated so far, of unfinished sequences too."""

    @property
    def unfinished_tokens(self) -> int:
        """Tokens generated for sequences that are still under way."""
        return sum(
            len(sequence.new_tokens)
            for batch in self._batches
            for sequence in batch.sequences
            if not sequence.is_finished
        )

    @torch.inference_mode()
    def run(self, sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
        """Generates for every sequence.

        Args:
            sequences: Read a few batches ahead; none has begun.

        Yields:
            After every pass over the weights the sequences that it finished, often none.
        """
        waiting = _Queue(_sorted_ahead(iter(sequences), self._limits.rows * _AHEAD))
        while True:
            free = self._limits.rows - sum(batch.num_live for batch in self._batches)
            if self._is_filling or not self._batches or free * _REFILL >= self._limits.rows:
                self._batches.extend(self._begin(self._admit(waiting, free)))
            if not self._batches:
                return
            yield self._step()

    def _admit(self, waiting: _Queue, free: int) -> list[Sequence]:
        """Takes prompts for which there are rows, cache and room for their states."""
        limits = self._limits
        self._is_filling = False
        if waiting.peek() is None:
            return []
        for batch in self._batches:
            batch.drop_finished(self._passing.store)
        going = sum(len(batch) for batch in self._batches)
        # Rows that are decoded together have as many slots each as the largest of them had.
        largest = max((batch.row_bytes for batch in self._batches), default=0)
        chosen: list[Sequence] = []
        tokens = 0
        while len(chosen) < free and (following := waiting.peek()) is not None:
            largest = max(largest, self._bytes_of(following))
            tokens += len(following.prompt)
            count = going + len(chosen) + 1
            full = limits.cache_bytes is not None and count * largest > limits.cache_bytes
            long = limits.pass_tokens is not None and tokens > limits.pass_tokens
            if (full and count > 1) or (long and chosen):
                self._is_filling = not full
                break
            chosen.append(waiting.take())
            self.num_prompt_tokens += len(following.prompt)
        return chosen

    def _bytes_of(self, sequence: Sequence) -> int:
        return self._limits.bytes_of(len(sequence.prompt), sequence.room)

    def _begin(self, sequences: list[Sequence]) -> Iterator[MicroBatch]:
        """Cuts new sequences into micro-batches that are small enough to be read."""
        own: list[Sequence] = []
        for sequence in sequences:
            longest = max(len(other.prompt) for other in [*own, sequence])
            full = longest * (len(own) + 1) > self._limits.prompt_tokens
            if own and (full or len(own) == self._limits.decode_rows):
                yield self._micro_batch(own)
                own = []
            own.append(sequence)
        if own:
            yield self._micro_batch(own)

    def _micro_batch(self, sequences: list[Sequence]) -> MicroBatch:
        batch = MicroBatch(sequences, self._make_cache(), self._device)
        batch.row_bytes = max(self._bytes_of(own) for own in sequences)
        return batch

    def _step(self) -> list[Sequence]:
        """One pass: every micro-batch reads its prompts or makes one token."""
        done: list[Sequence] = []
        for batch, logits in self._passing.run(self._model, self._batches):
            going = [sequence for sequence in batch.sequences if not sequence.is_finished]
            batch.take(self._chooser.choose(batch.sequences, logits), self._chooser.ends)
            self.num_tokens += len(going)
            done.extend(sequence for sequence in going if sequence.is_finished)
        self.num_passes += 1
        self._tidy()
        return done

    def _tidy(self) -> None:
        """Leaves out finished rows, and puts small micro-batches together."""
        kept: list[MicroBatch] = []
        for batch in self._batches:
            if batch.num_live == 0:
                self._passing.forget(batch)
                continue
            # Rows that are copied for nothing cost more than rows computed for nothing.
            if (len(batch) - batch.num_live) * _REFILL >= len(batch):
                batch.drop_finished(self._passing.store)
            last = kept[-1] if kept else None
            if last is not None and self._fits(last, batch):
                last.append(batch, join(last.cache, batch.cache, self._passing.store))
                self._passing.forget(batch)
            else:
                kept.append(batch)
        self._batches = kept

    def _fits(self, first: MicroBatch, second: MicroBatch) -> bool:
        if len(first) + len(second) > self._limits.decode_rows:
            return False
        return can_join(first.cache) and can_join(second.cache)


class _Queue:
    """Sequences that can be looked at before they are taken."""

    def __init__(self, sequences: Iterator[Sequence]) -> None:
        self._sequences = sequences
        self._next: Sequence | None = None

    def peek(self) -> Sequence | None:
        """The next one; ``None`` at the end."""
        if self._next is None:
            self._next = next(self._sequences, None)
        return self._next

    def take(self) -> Sequence:
        """Takes the one that was looked at."""
        assert self._next is not None
        taken, self._next = self._next, None
        return taken


def _sorted_ahead(sequences: Iterator[Sequence], window: int) -> Iterator[Sequence]:
    """Sequences in an order in which neighbours are of similar length."""
    while chunk := list(islice(sequences, window)):
        # The longest first: if one does not fit into memory, it shows at the beginning.
        yield from sorted(chunk, key=lambda sequence: -len(sequence.prompt))
