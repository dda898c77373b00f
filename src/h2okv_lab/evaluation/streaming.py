"""Texts and conversations, and an endless one of them on one cache, scored."""

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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.checkpoint import read_notes
from h2okv.cache.support import context_window
from h2okv.console import check_minimum
from h2okv.engine.memory import resident_bytes
from h2okv.engine.sampler import eos_token_ids
from h2okv.integration.enable import enable, read_blocks
from h2okv.prompts.chat_template import chat_text, encode
from h2okv.provenance import digest
from h2okv.records import check_settings, check_text, parse_json
from h2okv_lab.evaluation.model import has_learned_positions
from h2okv_lab.tables import CsvFile, Entry, read_csv, read_jsonl, write_csv

_ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """One message: its role is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


Conversation = tuple[Message, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """Read JSONL of ``turns`` (the user's messages) or ``messages`` (role and content)."""
    return [_conversation(line) for line in read_jsonl(path, "an object with turns or messages")]


def _conversation(line: Entry) -> Conversation:
    fields = [name for name in ("turns", "messages") if name in line.fields]
    if len(fields) != 1:
        problem = "both turns and messages" if fields else "neither turns nor messages"
        raise ValueError(f"{line.location} has {problem}; give one of these fields")
    name = fields[0]
    entries = line.fields[name]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{line.location}: {name} must be a list with at least one entry; add one")
    messages: list[Message] = []
    for number, entry in enumerate(entries):
        location = f"{line.location}: {name}[{number}]"
        if name == "turns":
            messages.append(Message("user", check_text(entry, location)))
        else:
            messages.append(_message(entry, location, messages[-1].role if messages else None))
    if all(message.role == "system" for message in messages):
        raise ValueError(f"{line.location}: messages must have a message of the user; add one")
    return tuple(messages)


def _message(entry: Any, location: str, previous_role: str | None) -> Message:
    """Read one of ``messages``, which follows one of the role ``previous_role``."""
    if not isinstance(entry, dict):
        raise ValueError(f"{location} must be an object with role and content")
    role = entry.get("role")
    if role not in _ROLES:
        raise ValueError(f"{location}.role must be one of {', '.join(_ROLES)}, got {role!r}")
    if role == "system" and previous_role is not None:
        raise ValueError(f"{location}.role must not be 'system' after the first message; move it")
    if role == "assistant" and previous_role != "user":
        raise ValueError(f"{location}.role is 'assistant' with no question before it; add one")
    return Message(role, check_text(entry.get("content"), f"{location}.content"))


# A placeholder for an answer that the model has yet to give. A template must leave it unchanged, so
# it is a single word, and one that no text contains.
_ANSWER = "h2okvAnswerStandsHere"


def chat_segments(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> list[tuple[str, bool]]:
    """Cut a conversation into texts to read, each with whether the model answers it."""
    messages: list[dict[str, str]] = []
    segments: list[tuple[str, bool]] = []
    roles = [*(message.role for message in conversation), None]
    for number, message in enumerate(conversation):
        messages.append(message._asdict())
        is_last, is_question = roles[number + 1] is None, message.role == "user"
        # An answer in the file is read.
        to_answer = is_question and roles[number + 1] != "assistant"
        if to_answer or (is_last and not is_question):
            text = chat_text(tokenizer, messages, to_answer=to_answer)
            if segments and _ANSWER not in text:
                raise ValueError(
                    "the model's chat template drops earlier answers, so a conversation cannot"
                    " continue on the cache; give conversations of one turn"
                )
            segments.append((text.rpartition(_ANSWER)[2], to_answer))
            messages.append({"role": "assistant", "content": _ANSWER})
    return segments


class Segment(NamedTuple):
    """Input tokens."""

    ids: torch.Tensor  # int64 [T]
    answers: bool  # whether the model answers after them


class TextSource:
    """One text as one sample, from tokens."""

    def __init__(self, ids: torch.Tensor, digest: str) -> None:
        if len(ids) < 2:
            raise ValueError(f"the text must have at least 2 tokens to be scored, got {len(ids)}")
        self.ids = ids
        self.digest = digest

    @classmethod
    def of_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TextSource:
        return cls(torch.tensor(encode(tokenizer, text, vocab_size)), digest(text))

    @property
    def num_tokens(self) -> int:
        """The number of tokens with a next token in the text."""
        return len(self.ids) - 1

    def __len__(self) -> int:
        return 1

    def __getitem__(self, sample: int) -> list[Segment]:
        return [Segment(self.ids, answers=False)]


class ConversationSource:
    """Conversations, each a sample; tokenized on access."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.conversations = read_conversations(path)
        self.digest = digest(repr(self.conversations))
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # Separators between a base model's conversations: its BOS, or an empty line without one.
        self._plain = not tokenizer.chat_template
        self._has_bos = bool(tokenizer("", verbose=False)["input_ids"])
        chat_segments(tokenizer, self.conversations[0])  # raises early if the template refuses

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, sample: int) -> list[Segment]:
        segments = []
        texts = chat_segments(self._tokenizer, self.conversations[sample])
        for number, (text, answers) in enumerate(texts):
            is_start = self._plain and number == 0
            if is_start and sample > 0 and not self._has_bos:
                text = f"\n\n{text}"
            # A chat template writes the special tokens into the text.
            ids = encode(self._tokenizer, text, self._vocab_size, special=is_start)
            segments.append(Segment(torch.tensor(ids, dtype=torch.int64), answers))
        return segments


# Samples, each a list of segments, that are read in order onto one cache. The digest identifies
# them when a stream is resumed.
StreamSource = TextSource | ConversationSource


class StreamRow(NamedTuple):
    """Measurements since the previous row."""

    position: int  # tokens of the stream read so far
    nll: float  # mean over the predictions since the previous row, in nats; see `Stream`
    step_seconds: float  # median over blocks of the forward pass
    rss_bytes: int | None  # of the process; None if unknown
    cache_bytes: int


COLUMNS = StreamRow._fields


class StreamFile(CsvFile):
    """The rows of a stream, written one by one: a killed run keeps them."""

    def __init__(self, path: Path, rows: Sequence[StreamRow] | None = None) -> None:
        if path.exists():
            if rows is None:
                raise ValueError(f"'{path}' exists already; add --resume, or choose another name")
            read_csv(path, COLUMNS)
        # Replace the file instead of truncating it: no row is ever missing.
        write_csv(path, map(_cells, rows or ()), COLUMNS)
        super().__init__(path, COLUMNS)

    def extend(self, rows: Iterable[StreamRow]) -> None:
        for row in rows:
            self.append(_cells(row))


def _cells(row: StreamRow) -> dict[str, Any]:
    return {**row._asdict(), "nll": repr(row.nll)}  # repr round-trips a float exactly


@dataclass(frozen=True)
class StreamSettings:
    """Options of a stream; a ``block`` of 1 is the paper's Algorithm 1."""

    block: int = 64  # tokens of input text in one forward
    every: int | None = 1000  # tokens between two rows; None: a row for each segment
    tokens: int | None = None  # where to stop; None for the source's end
    max_new_tokens: int = 128  # of an answer

    def __post_init__(self) -> None:
        check_minimum(**asdict(self))


_KEY = "stream"
_VERSION = 2


@dataclass
class StreamState:
    """State of a stream between two blocks; a checkpoint contains all of it."""

    position: int = 0  # tokens read so far
    sample: int = 0  # index of the current sample
    segment: int = 0  # index of its current segment
    read: int = 0  # tokens of that segment, the pending ones before it included
    # The token before the segment, if it is not in the cache yet.
    pending: list[int] = field(default_factory=list)
    # The model's answer so far; its last token is not in the cache yet.
    answer: list[int] = field(default_factory=list)
    total_nll: float = 0.0  # of all tokens so far, in nats
    nll: float = 0.0  # of the tokens since the last row
    count: int = 0  # of the tokens since the last row
    steps: list[float] = field(default_factory=list)  # seconds of each block since the last row
    last_step: float = 0.0  # of the newest block
    seconds: float = 0.0  # in forward passes
    rows: list[StreamRow] = field(default_factory=list)


class Step(NamedTuple):
    """The outcome of one block."""

    rows: Sequence[StreamRow] = ()  # completed by it; usually empty
    answer: tuple[int, ...] | None = None  # completed by it
    # No block, but the point before one that the stream's limit shortens: resumed from here, a
    # longer stream reads the same blocks as without that limit.
    precedes_cut: bool = False


@dataclass(eq=False)
class Stream:
    """A source read onto one cache; it can be saved, stopped and resumed between two blocks.

    A token's negative log-likelihood is that of its next token: in the input text, or the most
    likely one in an answer of the model. Rows by segment leave out the answers: their ``nll`` is of
    the text that the model was given.
    """

    model: PreTrainedModel
    cache: H2OCache
    source: StreamSource
    settings: StreamSettings
    identity: Mapping[str, Any] = field(default_factory=dict)  # must match on resuming
    state: StreamState = field(default_factory=StreamState)

    def __post_init__(self) -> None:
        self._end_ids = eos_token_ids(self.model)
        # Learned positions limit a stream unless the cache changes positions.
        config = self.model.config
        ends = self.cache.position_rule.positions == "original" and has_learned_positions(config)
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
        """Resume from a checkpoint; refuse one with other settings."""
        stream = cls(model, H2OCache.load(path, model), source, settings, identity or {})
        notes, expected = read_notes(path), stream._checkpoint_settings()
        again = "start again without --resume"
        if _KEY not in notes:
            raise ValueError(f"'{path}' is not a stream's checkpoint; give one of h2okv stream")
        try:
            content: dict[str, Any] = parse_json(notes[_KEY])
            if (version := content["version"]) != _VERSION:
                raise ValueError(f"'{path}' must be of version {_VERSION}, got {version}; {again}")
            rows = [StreamRow(**row) for row in content["state"].pop("rows")]
            stream.state = StreamState(**content["state"], rows=rows)
            saved = {name: content["settings"].get(name) for name in expected}
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"'{path}' is damaged; {again}") from error
        check_settings(saved, expected, f"'{path}'")
        return stream

    def save(self, path: Path) -> None:
        """Write cache and state into one file, atomically; call it between two blocks."""
        state = {**vars(self.state), "rows": [row._asdict() for row in self.state.rows]}
        content = {"version": _VERSION, "settings": self._checkpoint_settings(), "state": state}
        self.cache.save(path, notes={_KEY: json.dumps(content)})

    def _checkpoint_settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must match."""
        settings = {name.replace("_", "-"): value for name, value in vars(self.settings).items()}
        del settings["tokens"]  # a resumed stream may be longer
        return {**self.identity, "text": self.source.digest, **settings}

    def blocks(self) -> Generator[Step]:
        with enable(self.model):
            for sample in range(self.state.sample, len(self.source)):
                for segment in self.source[sample][self.state.segment :]:
                    yield from self._read_segment(segment)
                    if self._room == 0:
                        return
                self.state.sample, self.state.segment = sample + 1, 0

    def all_rows(self) -> list[StreamRow]:
        """Return the rows so far, with the incomplete last one."""
        return self.state.rows + ([self._row()] if self.state.count else [])

    @property
    def _room(self) -> int | None:
        """Tokens left before the stream's limit; None without one."""
        limit = self.settings.tokens
        return None if limit is None else max(limit - self.state.position, 0)

    def _read_segment(self, segment: Segment) -> Iterator[Step]:
        """Read a segment's tokens and, if it needs one, the model's answer."""
        state = self.state
        ids = segment.ids
        if state.pending:
            # An end token that both the model and the template wrote counts once.
            repeated = state.pending[0] in self._end_ids and ids[:1].tolist() == state.pending
            ids = torch.cat([torch.tensor(state.pending), ids[1:] if repeated else ids])
        # Without an answer the last token waits for its next token.
        end = len(ids) if segment.answers else len(ids) - 1
        limit = end if self._room is None else min(end, state.read + self._room)
        # The limit may shorten a block, which changes what is evicted.
        cut = 0 if limit == end else (limit - state.read) % self.settings.block
        yield from self._read(ids, limit - cut)
        if cut:
            yield Step(precedes_cut=True)
            yield from self._read(ids, limit)
        while self._room != 0 and segment.answers and not self._is_answered:
            yield from self._read(torch.tensor(state.answer[-1:]), 1, is_answer=True)
        if self.settings.every is None and state.count:
            yield Step([self._end_row()])
        if self._room != 0:
            state.pending = state.answer[-1:] or ids[-1:].tolist()
            state.answer, state.read = [], 0
            state.segment += 1

    def _read(self, ids: torch.Tensor, end: int, is_answer: bool = False) -> Iterator[Step]:
        """Read ``ids [T]``, of the segment or of the model's answer, up to ``end``."""
        start = 0 if is_answer else self.state.read
        if start >= end:
            return
        last = self.state.position + end - start
        if self._last_position is not None and last > self._last_position:
            raise ValueError(  # instead of an index error in the model
                f"the model has learned positions for {self._last_position} tokens, and the stream"
                f" needs {last}; use --cache positions=clamped, or stop by --tokens"
                f" {self._last_position}"
            )
        began = time.perf_counter()
        chunk = self.settings.block
        for num_read, logits in read_blocks(
            self.model, ids[None, start:end], self.cache, chunk, all_logits=True
        ):
            read = start + num_read
            following = ids[read - logits.shape[1] + 1 : read + 1].tolist()
            chosen = [int(logits[0, -1].argmax())] if read == len(ids) else []
            if not is_answer:
                self.state.read = read
            rows = self._score(logits[0], following + chosen, len(following), began)
            self.state.answer += chosen
            # The stream's limit may end an answer early.
            is_done = chosen and (self._is_answered or self._room == 0)
            yield Step(rows, tuple(self.state.answer) if is_done else None)
            began = time.perf_counter()

    def _score(
        self, logits: torch.Tensor, following: list[int], num_text: int, began: float
    ) -> list[StreamRow]:
        """Score a block's logits ``[c, V]``; return the rows that it completes.

        The first ``num_text`` of the following tokens are in the input.
        """
        state = self.state
        targets = torch.tensor(following, device=logits.device)
        # `tolist` waits for the device, so the time is the block's.
        values = F.cross_entropy(logits.float(), targets, reduction="none").tolist()
        state.last_step = time.perf_counter() - began
        if any(map(math.isnan, values)):
            raise ValueError(
                f"the model's output is not a number after {state.position} tokens; its data"
                " type may be too narrow, try --dtype float32"
            )
        state.seconds += state.last_step
        state.steps.append(state.last_step)
        before, every = len(state.rows), self.settings.every
        for number, value in enumerate(values):
            state.position += 1
            state.total_nll += value
            if every is None and number >= num_text:
                continue
            state.count += 1
            state.nll += value
            if every is not None and state.position % every == 0:
                self._end_row()
        return state.rows[before:]

    def _end_row(self) -> StreamRow:
        state = self.state
        state.rows.append(self._row())
        state.nll, state.count, state.steps = 0.0, 0, []
        return state.rows[-1]

    def _row(self) -> StreamRow:
        state = self.state
        # A block that completes several rows counts as a step in each.
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
    """Read a stream until it ends or is stopped; at its end also write the incomplete row.

    The last checkpoint precedes that row and a block that the stream's limit shortened: a resumed,
    longer stream is the same as one of that length from the start.
    """
    state = stream.state
    saved, ended, cut = state.position, True, False
    with closing(stream.blocks()) as blocks:  # closing restores the model's attention
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
