"""A text without end on one cache, scored."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.checkpoint import read_notes
from h2okv.cache.validation import context_window
from h2okv.console import check_least
from h2okv.engine.memory import resident_bytes
from h2okv.engine.sampler import eos_token_ids
from h2okv.evaluation.model import has_learned_positions
from h2okv.evaluation.stream_data import Segment, StreamSource
from h2okv.integration.enable import enable, read_blocks
from h2okv.records import CsvFile, check_settings, parse_json, read_csv, write_csv


class StreamRow(NamedTuple):
    """What was measured since the row before."""

    position: int  # tokens of the stream that have been through the cache
    nll: float  # in nats, the mean over the tokens that followed those read since the last row
    step_seconds: float  # of one block's forward pass, the median
    rss_bytes: int | None  # what the process holds; None where it is not known
    cache_bytes: int  # what the cache holds


COLUMNS = StreamRow._fields


class StreamFile(CsvFile):
    """The rows of a stream, each there as soon as it is known, so that a killed run keeps them."""

    def __init__(self, path: Path, rows: Sequence[StreamRow] | None = None) -> None:
        if path.exists():
            if rows is None:
                raise ValueError(f"'{path}' exists already; add --resume, or choose another name")
            read_csv(path, COLUMNS)
        # A new file in its place, not a file cut short: at no moment are rows missing.
        write_csv(path, map(_cells, rows or ()), COLUMNS)
        super().__init__(path, COLUMNS)

    def extend(self, rows: Iterable[StreamRow]) -> None:
        for row in rows:
            self.append(_cells(row))


def _cells(row: StreamRow) -> dict[str, Any]:
    return {**row._asdict(), "nll": repr(row.nll)}  # which gives a float back exactly


@dataclass(frozen=True)
class StreamSettings:
    """How a stream is read; a ``prefill_chunk`` of 1 is the paper's Algorithm 1."""

    prefill_chunk: int = 64  # tokens of given text that are read at once
    every: int = 1000  # tokens between two rows
    tokens: int | None = None  # where to stop; None for the source's end
    max_new_tokens: int = 128  # the most tokens of an answer

    def __post_init__(self) -> None:
        check_least(**asdict(self))


_KEY = "stream"
_VERSION = 2


@dataclass
class StreamState:
    """Where a stream stands between two blocks; all of it is in a checkpoint."""

    position: int = 0  # tokens that have been through the cache
    sample: int = 0  # the sample that is being read
    segment: int = 0  # the segment of it
    read: int = 0  # tokens of that segment, the pending ones before it included
    # The token before the segment, if it has not been through the cache yet.
    pending: list[int] = field(default_factory=list)
    # What the model has answered so far; its last token is not read yet.
    answer: list[int] = field(default_factory=list)
    total_nll: float = 0.0  # of all tokens so far, in nats
    nll: float = 0.0  # of the tokens since the last row,
    count: int = 0  # and how many these are
    steps: list[float] = field(default_factory=list)  # seconds of each block since the last row
    last_step: float = 0.0  # of the newest block
    seconds: float = 0.0  # in forward passes
    rows: list[StreamRow] = field(default_factory=list)


class Step(NamedTuple):
    """What one block brought."""

    rows: Sequence[StreamRow] = ()  # those that became complete with it; mostly none
    answer: tuple[int, ...] | None = None  # the answer that it completed
    # No block, but the place before one that the stream's limit cuts short: from here a longer
    # stream reads what it would have read without that limit.
    precedes_cut: bool = False


@dataclass(eq=False)
class Stream:
    """Reads a source on one cache; between two blocks it can be saved, stopped and gone on with.

    A token's negative log-likelihood is that of the token after it: the next one of a given text,
    or the likeliest, which the model itself chose for its answer.
    """

    model: PreTrainedModel
    cache: H2OCache
    source: StreamSource
    settings: StreamSettings
    identity: Mapping[str, Any] = field(default_factory=dict)  # what a checkpoint is bound to
    state: StreamState = field(default_factory=StreamState)

    def __post_init__(self) -> None:
        self._end_ids = eos_token_ids(self.model)
        # Where learned positions end, if they are the text's.
        config = self.model.config
        ends = self.cache.rule.positions == "original" and has_learned_positions(config)
        self._last_position = context_window(config) if ends else None

    @classmethod
    def resume(
        cls,
        model: PreTrainedModel,
        path: Path,
        source: StreamSource,
        settings: StreamSettings,
        identity: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Go on from a checkpoint; refuses one that was begun with other settings."""
        if not path.is_file():
            raise ValueError(f"'{path}' does not exist: nothing to go on with; omit --resume")
        stream = cls(model, H2OCache.load(path, model), source, settings, identity or {})
        notes, wanted, again = read_notes(path), stream._fixed(), "begin again without --resume"
        if _KEY not in notes:
            raise ValueError(f"'{path}' holds no stream; give a file that h2okv stream saved")
        try:
            content: dict[str, Any] = parse_json(notes[_KEY])
            if (version := content["version"]) != _VERSION:
                raise ValueError(f"'{path}' is of version {version}, not of {_VERSION}; {again}")
            rows = [StreamRow(**row) for row in content["state"].pop("rows")]
            stream.state = StreamState(**content["state"], rows=rows)
            saved = {name: content["settings"].get(name) for name in wanted}
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"'{path}' is damaged; {again}") from error
        check_settings(saved, wanted, f"'{path}'")
        return stream

    def save(self, path: Path) -> None:
        """Write cache and state into one file, which is complete or not there; between blocks."""
        state = {**vars(self.state), "rows": [row._asdict() for row in self.state.rows]}
        content = {"version": _VERSION, "settings": self._fixed(), "state": state}
        self.cache.save(path, notes={_KEY: json.dumps(content)})

    def _fixed(self) -> dict[str, Any]:
        """What a checkpoint is bound to."""
        read = {name.replace("_", "-"): value for name, value in vars(self.settings).items()}
        del read["tokens"]  # a stream may be made longer
        return {**self.identity, "text": self.source.digest, **read}

    def blocks(self) -> Generator[Step]:
        with enable(self.model):
            for sample in range(self.state.sample, len(self.source)):
                for segment in self.source[sample][self.state.segment :]:
                    yield from self._read_segment(segment)
                    if self._room == 0:
                        return
                self.state.sample, self.state.segment = sample + 1, 0

    def all_rows(self) -> list[StreamRow]:
        """The rows so far, with that of what came after the last complete one."""
        return self.state.rows + ([self._row()] if self.state.count else [])

    @property
    def _room(self) -> int | None:
        """Tokens left before the stream's limit; None without one."""
        limit = self.settings.tokens
        return None if limit is None else max(limit - self.state.position, 0)

    def _read_segment(self, segment: Segment) -> Iterator[Step]:
        """Read what is given and, where it is wanted, answers."""
        state = self.state
        ids = segment.ids
        if state.pending:
            # An end token that both the model and the template wrote is one token.
            repeated = state.pending[0] in self._end_ids and ids[:1].tolist() == state.pending
            ids = torch.cat([torch.tensor(state.pending), ids[1:] if repeated else ids])
        # Without an answer the last token waits until it is known what follows it.
        end = len(ids) if segment.answers else len(ids) - 1
        limit = end if self._room is None else min(end, state.read + self._room)
        # A block that the limit cuts short is another block than without the limit.
        cut = 0 if limit == end else (limit - state.read) % self.settings.prefill_chunk
        yield from self._read(ids, limit - cut)
        if cut:
            yield Step(precedes_cut=True)
            yield from self._read(ids, limit)
        while self._room != 0 and segment.answers and not self._is_answered:
            yield from self._read(torch.tensor(state.answer[-1:]), 1, own=True)
        if self._room != 0:
            state.pending = state.answer[-1:] or ids[-1:].tolist()
            state.answer, state.read = [], 0
            state.segment += 1

    def _read(self, ids: torch.Tensor, end: int, own: bool = False) -> Iterator[Step]:
        """Read `ids [T]`, the segment's or the newest of the model's own, on to `end`."""
        start = 0 if own else self.state.read
        if start >= end:
            return
        last = self.state.position + end - start
        if self._last_position is not None and last > self._last_position:
            raise ValueError(  # which would end in a crash
                f"the model has learned positions for {self._last_position} tokens, and the stream"
                f" goes on to {last}; use --positions clamped, or stop by --tokens"
                f" {self._last_position}"
            )
        began = time.perf_counter()
        chunk = self.settings.prefill_chunk
        for done, logits in read_blocks(
            self.model, ids[None, start:end], self.cache, chunk, all_logits=True
        ):
            read = start + done
            following = ids[read - logits.shape[1] + 1 : read + 1].tolist()
            chosen = [int(logits[0, -1].argmax())] if read == len(ids) else []
            if not own:
                self.state.read = read
            rows = self._score(logits[0], following + chosen, began)
            self.state.answer += chosen
            # At the stream's limit an answer may be complete only in part.
            is_done = chosen and (self._is_answered or self._room == 0)
            yield Step(rows, tuple(self.state.answer) if is_done else None)
            began = time.perf_counter()

    def _score(self, logits: torch.Tensor, following: list[int], began: float) -> list[StreamRow]:
        """Score a block, `logits [c, V]`, by the tokens after it; the rows that it completes."""
        state = self.state
        targets = torch.tensor(following, device=logits.device)
        # Numbers wait for the device, so that the time is the block's.
        values = F.cross_entropy(logits.float(), targets, reduction="none").tolist()
        state.last_step = time.perf_counter() - began
        if any(map(math.isnan, values)):
            raise ValueError(
                f"the model's output is not a number after {state.position} tokens; its data"
                " type may be too narrow, try --dtype float32"
            )
        state.seconds += state.last_step
        state.steps.append(state.last_step)
        before = len(state.rows)
        for value in values:
            state.position += 1
            state.count += 1
            state.nll += value
            state.total_nll += value
            if state.position % self.settings.every == 0:
                state.rows.append(self._row())
                state.nll, state.count, state.steps = 0.0, 0, []
        return state.rows[before:]

    def _row(self) -> StreamRow:
        state = self.state
        # A block that fills several rows is the step of each of them.
        median = statistics.median(state.steps or [state.last_step])
        nll, cached = state.nll / state.count, self.cache.nbytes
        return StreamRow(state.position, nll, median, resident_bytes(), cached)

    @property
    def _is_answered(self) -> bool:
        answer = self.state.answer
        return len(answer) >= self.settings.max_new_tokens or answer[-1] in self._end_ids


def run_stream(
    stream: Stream,
    *,
    rows: StreamFile | None = None,
    checkpoint: Path | None = None,
    save_every: int = 10_000,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[Step], None] = lambda _: None,
) -> bool:
    """Read a stream until it ends or is stopped; at the end, an incomplete row is written too.

    The last checkpoint is older than that row, and than a block that the stream's limit cut short,
    so that a stream can be made longer as if it had been so from the start.
    """
    state = stream.state
    saved, ended, cut = state.position, True, False
    with closing(stream.blocks()) as blocks:  # which gives the model its own attention back
        for step in blocks:
            if rows is not None:
                rows.extend(step.rows)
            on_step(step)
            is_due = state.position - saved >= (1 if step.precedes_cut else save_every)
            if checkpoint is not None and is_due and not cut:
                stream.save(checkpoint)
                saved = state.position
            cut = cut or step.precedes_cut
            if should_stop():
                ended = False
                break
    if checkpoint is not None and state.position > saved and not cut:
        stream.save(checkpoint)
    if ended and rows is not None:
        rows.extend(stream.all_rows()[len(state.rows) :])
    return ended
