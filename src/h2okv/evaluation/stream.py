"""Streams: text without end through a model with a cache of fixed size, scored token by token.

As in the streaming experiments of H2O (arXiv 2306.14048) and StreamingLLM (arXiv 2309.17453),
everything runs on one cache that is never emptied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.persistence import read_notes
from h2okv.cache.support import check_positions, trained_window
from h2okv.evaluation.end_tokens import end_token_ids
from h2okv.evaluation.resident_memory import resident_bytes
from h2okv.evaluation.stream_record import Row
from h2okv.evaluation.stream_settings import StreamSettings
from h2okv.evaluation.stream_source import Piece, StreamSource
from h2okv.evaluation.stream_state import Setting, StreamState
from h2okv.integration import enable
from h2okv.integration.reading import read_blocks


@dataclass(frozen=True)
class Step:
    """What one block brought.

    Attributes:
        rows: The rows that became complete with it; mostly none.
        answer: The tokens of the answer that it completed.
        precedes_cut: Whether it is no block, but the place before one that the stream's limit
            cuts short: from here a longer stream reads what it would have read without that limit.
    """

    rows: tuple[Row, ...] = ()
    answer: tuple[int, ...] | None = None
    precedes_cut: bool = False


class Stream:
    """Reads a source on one cache; between two blocks it can be saved, stopped and gone on with.

    A token's position counts the tokens that went through the cache, and its negative
    log-likelihood is that of the token after it: the next one of a given text, or the one that
    the model itself chose for its answer, always the likeliest.

    Args:
        model: The model; its attention is H2O's while blocks are read.
        cache: Mutated.
        source: What to read.
        settings: How to read it.
        identity: What else must be the same when the stream is resumed, by name.
        state: Where to go on; from the start if None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: H2OCache,
        source: StreamSource,
        settings: StreamSettings,
        identity: Mapping[str, Setting] | None = None,
        state: StreamState | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.source = source
        self.settings = settings
        self.state = state or StreamState()
        self._identity = dict(identity or {})
        self._end_ids = end_token_ids(model)
        self._last_position = _last_position(model, cache)

    @classmethod
    def resume(
        cls,
        model: PreTrainedModel,
        path: Path,
        source: StreamSource,
        settings: StreamSettings,
        identity: Mapping[str, Setting] | None = None,
    ) -> Stream:
        """Goes on where a checkpoint stands.

        Args:
            model: The same model.
            path: What `save` wrote.
            source: The same source.
            settings: The same, except for `tokens`, which may have grown.
            identity: The same.

        Returns:
            The stream.

        Raises:
            ValueError: If the checkpoint is damaged, or of another model or other settings.
        """
        if not path.is_file():
            raise ValueError(
                f"'{path}' does not exist, so there is nothing to go on with; begin without"
                " --resume"
            )
        stream = cls(model, H2OCache.load(path, model), source, settings, identity)
        stream.state = StreamState.from_notes(read_notes(path), stream._fixed(), str(path))
        return stream

    def save(self, path: Path) -> None:
        """Writes cache and state into one file, which is complete or not there; between blocks.

        Args:
            path: The file; one that is there is replaced.
        """
        self.cache.save(path, notes=self.state.to_notes(self._fixed()))

    def _fixed(self) -> dict[str, Setting]:
        """What a checkpoint is bound to."""
        settings = self.settings
        return {
            **self._identity,
            "text": self.source.digest,
            "chunk": settings.chunk,
            "every": settings.every,
            "max-new-tokens": settings.max_new_tokens,
        }

    def blocks(self) -> Generator[Step]:
        """Reads block after block; mutates cache and state.

        Yields:
            What each block brought. Cache and state fit together whenever this yields.

        Raises:
            ValueError: If the model's output is no number any more.
        """
        with enable(self.model):
            for sample in range(self.state.sample, len(self.source)):
                pieces = self.source[sample]
                for piece in pieces[self.state.piece :]:
                    yield from self._read_piece(piece)
                    if self._room == 0:
                        return
                self.state.sample, self.state.piece = sample + 1, 0

    def last_row(self) -> Row | None:
        """Makes the row of what came after the last complete one; changes nothing.

        Returns:
            The row; None if nothing did.
        """
        return self._row() if self.state.count else None

    @property
    def _room(self) -> int | None:
        """Tokens left before the stream's limit; None without one."""
        limit = self.settings.tokens
        return None if limit is None else max(limit - self.state.position, 0)

    def _read_piece(self, piece: Piece) -> Iterator[Step]:
        """Reads what is given and, where it is wanted, answers."""
        state = self.state
        ids = piece.ids
        if state.pending:
            # An end token that both the model and the template wrote is one token.
            repeated = state.pending[0] in self._end_ids and ids[:1].tolist() == state.pending
            ids = torch.cat([torch.tensor(state.pending), ids[1:] if repeated else ids])
        # Without an answer the last token waits until it is known what follows it.
        yield from self._read_given(ids, len(ids) if piece.answers else len(ids) - 1)
        if self._room == 0:
            return
        while piece.answers and not self._is_answered:
            yield from self._read_own()
            if self._room == 0:
                return
        state.pending = state.answer[-1:] or ids[-1:].tolist()
        state.answer = []
        state.read = 0
        state.piece += 1

    def _read_given(self, ids: torch.Tensor, end: int) -> Iterator[Step]:
        """Reads `ids [T]` up to `end`; if that is its length, the model chooses what follows."""
        start = self.state.read
        limit = end if self._room is None else min(end, start + self._room)
        # A block that the limit cuts short is another block than without the limit.
        whole = limit if limit == end else limit - (limit - start) % self.settings.chunk
        yield from self._read_blocks(ids, whole)
        if whole < limit:
            yield Step(precedes_cut=True)
            yield from self._read_blocks(ids, limit)

    def _read_blocks(self, ids: torch.Tensor, end: int) -> Iterator[Step]:
        """Reads `ids [T]` on to `end`, block by block."""
        start = self.state.read
        if start >= end:
            return
        self._check_positions(end - start)
        began = time.perf_counter()
        blocks = read_blocks(
            self.model, ids[None, start:end], self.cache, self.settings.chunk, all_logits=True
        )
        for done, logits in blocks:
            following = ids[self.state.read + 1 : start + done + 1]
            chosen = []
            if start + done == len(ids):
                chosen = [int(logits[0, -1].argmax())]
            self.state.read = start + done
            yield self._step(logits[0], following.tolist() + chosen, chosen, began)
            began = time.perf_counter()

    def _read_own(self) -> Iterator[Step]:
        """Reads the last token of the answer, and chooses the one after it."""
        self._check_positions(1)
        began = time.perf_counter()
        last = torch.tensor([self.state.answer[-1:]])
        for _, logits in read_blocks(self.model, last, self.cache, 1):
            chosen = [int(logits[0, -1].argmax())]
            yield self._step(logits[0], chosen, chosen, began)

    def _check_positions(self, count: int) -> None:
        """Refuses tokens that learned positions do not reach, which would end in a crash."""
        last = self.state.position + count
        if self._last_position is not None and last > self._last_position:
            raise ValueError(
                f"the model has learned positions for {self._last_position} tokens, and the stream"
                f" goes on to {last}; use --positions clamped, or stop by --tokens"
                f" {self._last_position}"
            )

    def _step(
        self, logits: torch.Tensor, following: list[int], chosen: list[int], began: float
    ) -> Step:
        """Scores a block: `logits [c, V]` against the tokens after it; mutates the state."""
        targets = torch.tensor(following, device=logits.device)
        nlls = F.cross_entropy(logits.float(), targets, reduction="none")
        values = nlls.tolist()  # waits for the device, so that the time is the block's
        seconds = time.perf_counter() - began
        if not all(map(_is_number, values)):
            raise ValueError(
                f"the model's output is not a number after {self.state.position} tokens; its data"
                " type may be too narrow, try --dtype float32"
            )
        rows = self._note(values, seconds)
        self.state.answer += chosen
        # At the stream's limit an answer may be complete only in part.
        done = chosen and (self._is_answered or self._room == 0)
        return Step(tuple(rows), tuple(self.state.answer) if done else None)

    def _note(self, values: list[float], seconds: float) -> list[Row]:
        """Adds a block's numbers to the state, and makes the rows that they complete."""
        state = self.state
        state.seconds += seconds
        state.last_step = seconds
        state.steps.append(seconds)
        rows = []
        for value in values:
            state.position += 1
            state.count += 1
            state.nll += value
            state.total_nll += value
            if state.position % self.settings.every == 0:
                rows.append(self._row())
                state.nll, state.count, state.steps = 0.0, 0, []
        state.rows += rows
        return rows

    def _row(self) -> Row:
        state = self.state
        return Row(
            position=state.position,
            nll=state.nll / state.count,
            # A block that fills several rows is the step of each of them.
            step_seconds=statistics.median(state.steps or [state.last_step]),
            rss_bytes=resident_bytes(),
            cache_bytes=self.cache.nbytes,
        )

    @property
    def _is_answered(self) -> bool:
        answer = self.state.answer
        return len(answer) >= self.settings.max_new_tokens or answer[-1] in self._end_ids


def _is_number(value: float) -> bool:
    return value == value


def _last_position(model: PreTrainedModel, cache: H2OCache) -> int | None:
    """Where learned positions end, if they are the text's; rotary ones just go on."""
    if cache.rule.positions != "original":
        return None
    try:
        check_positions(model.config, "clamped", cache.policy)
    except ValueError:
        return None
    return trained_window(model.config)
