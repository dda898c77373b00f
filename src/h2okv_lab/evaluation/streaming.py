"""Texts and conversations, and an endless one of them on one cache, scored."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.support import context_window
from h2okv.engine.memory import resident_bytes
from h2okv.engine.sampler import eos_token_ids
from h2okv.integration.enable import enable, read_blocks
from h2okv.prompts.chat_template import chat_text, encode
from h2okv.records import check_text
from h2okv_lab.evaluation.model import has_learned_positions
from h2okv_lab.tables import CsvFile, Entry, check_minimum, read_jsonl

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

    def __init__(self, ids: torch.Tensor) -> None:
        if len(ids) < 2:
            raise ValueError(f"the text must have at least 2 tokens to be scored, got {len(ids)}")
        self.ids = ids

    @classmethod
    def of_text(cls, text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TextSource:
        return cls(torch.tensor(encode(tokenizer, text, vocab_size)))

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


# Samples, each a list of segments, that are read in order onto one cache.
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

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ValueError(f"'{path}' exists already; choose another name, or move it away")
        super().__init__(path, COLUMNS)

    def extend(self, rows: Iterable[StreamRow]) -> None:
        for row in rows:
            self.append({**row._asdict(), "nll": repr(row.nll)})  # repr round-trips a float exactly


@dataclass(frozen=True)
class StreamSettings:
    """Options of a stream; a ``block`` of 1 is the paper's Algorithm 1."""

    block: int = 64  # tokens of input text in one forward
    every: int | None = 1000  # tokens between two rows; None: a row for each segment
    tokens: int | None = None  # where to stop; None for the source's end
    max_new_tokens: int = 128  # of an answer

    def __post_init__(self) -> None:
        check_minimum(**asdict(self))


class Step(NamedTuple):
    """The outcome of one block."""

    rows: Sequence[StreamRow] = ()  # completed by it; usually empty
    answer: tuple[int, ...] | None = None  # completed by it


@dataclass(eq=False)
class Stream:
    """A source read onto one cache, block by block.

    A token's negative log-likelihood is that of its next token: in the input text, or the most
    likely one in an answer of the model. Rows by segment leave out the answers: their ``nll`` is of
    the text that the model was given.
    """

    model: PreTrainedModel
    cache: H2OCache
    source: StreamSource
    settings: StreamSettings
    position: int = 0  # tokens read so far
    sample: int = 0  # index of the current sample
    segment: int = 0  # index of its current segment
    total_nll: float = 0.0  # of all tokens so far, in nats
    seconds: float = 0.0  # in forward passes
    rows: list[StreamRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end_ids = eos_token_ids(self.model)
        # Learned positions limit a stream unless the cache changes positions.
        config = self.model.config
        ends = self.cache.position_rule.positions == "original" and has_learned_positions(config)
        self._last_position = context_window(config) if ends else None
        # The token before the segment, and the model's answer so far, whose last token is not in
        # the cache yet, either.
        self._pending: list[int] = []
        self._answer: list[int] = []
        # Since the last row: the sum and number of the losses, and the seconds of each block.
        self._nll, self._count, self._steps = 0.0, 0, list[float]()
        self._last_step = 0.0

    def blocks(self) -> Generator[Step]:
        with enable(self.model):
            for sample in range(len(self.source)):
                for number, segment in enumerate(self.source[sample]):
                    self.sample, self.segment = sample, number
                    yield from self._read_segment(segment)
                    if self._room == 0:
                        return

    def all_rows(self) -> list[StreamRow]:
        """Return the rows so far, with the incomplete last one."""
        return self.rows + ([self._row()] if self._count else [])

    @property
    def _room(self) -> int | None:
        """Tokens left before the stream's limit; None without one."""
        limit = self.settings.tokens
        return None if limit is None else max(limit - self.position, 0)

    def _read_segment(self, segment: Segment) -> Iterator[Step]:
        """Read a segment's tokens and, if it needs one, the model's answer."""
        ids = segment.ids
        if self._pending:
            # An end token that both the model and the template wrote counts once.
            repeated = self._pending[0] in self._end_ids and ids[:1].tolist() == self._pending
            ids = torch.cat([torch.tensor(self._pending), ids[1:] if repeated else ids])
        # Without an answer the last token waits for its next token.
        end = len(ids) if segment.answers else len(ids) - 1
        yield from self._read(ids, end if self._room is None else min(end, self._room))
        while self._room != 0 and segment.answers and not self._is_answered:
            yield from self._read(torch.tensor(self._answer[-1:]), 1)
        if self.settings.every is None and self._count:
            yield Step([self._end_row()])
        self._pending, self._answer = self._answer[-1:] or ids[-1:].tolist(), []

    def _read(self, ids: torch.Tensor, end: int) -> Iterator[Step]:
        """Read ``ids [T]``, of the segment or of the model's answer, up to ``end``."""
        if not end:
            return
        last = self.position + end
        if self._last_position is not None and last > self._last_position:
            raise ValueError(  # instead of an index error in the model
                f"the model has learned positions for {self._last_position} tokens, and the stream"
                f" needs {last}; use --cache positions=clamped, or stop by --tokens"
                f" {self._last_position}"
            )
        began = time.perf_counter()
        for read, logits in read_blocks(
            self.model, ids[None, :end], self.cache, self.settings.block, all_logits=True
        ):
            following = ids[read - logits.shape[1] + 1 : read + 1].tolist()
            chosen = [int(logits[0, -1].argmax())] if read == len(ids) else []
            rows = self._score(logits[0], following + chosen, len(following), began)
            self._answer += chosen
            # The stream's limit may end an answer early.
            is_done = chosen and (self._is_answered or self._room == 0)
            yield Step(rows, tuple(self._answer) if is_done else None)
            began = time.perf_counter()

    def _score(
        self, logits: torch.Tensor, following: list[int], num_text: int, began: float
    ) -> list[StreamRow]:
        """Score a block's logits ``[c, V]``; return the rows that it completes.

        The first ``num_text`` of the following tokens are in the input.
        """
        targets = torch.tensor(following, device=logits.device)
        # `tolist` waits for the device, so the time is the block's.
        values = F.cross_entropy(logits.float(), targets, reduction="none").tolist()
        self._last_step = time.perf_counter() - began
        if any(map(math.isnan, values)):
            raise ValueError(
                f"the model's output is not a number after {self.position} tokens; its data"
                " type may be too narrow, try --dtype float32"
            )
        self.seconds += self._last_step
        self._steps.append(self._last_step)
        before, every = len(self.rows), self.settings.every
        for number, value in enumerate(values):
            self.position += 1
            self.total_nll += value
            if every is None and number >= num_text:
                continue
            self._count += 1
            self._nll += value
            if every is not None and self.position % every == 0:
                self._end_row()
        return self.rows[before:]

    def _end_row(self) -> StreamRow:
        self.rows.append(self._row())
        self._nll, self._count, self._steps = 0.0, 0, []
        return self.rows[-1]

    def _row(self) -> StreamRow:
        # A block that completes several rows counts as a step in each.
        median = statistics.median(self._steps or [self._last_step])
        nll, cached = self._nll / self._count, self.cache.nbytes
        return StreamRow(self.position, nll, median, resident_bytes(), cached)

    @property
    def _is_answered(self) -> bool:
        answer = self._answer
        return len(answer) >= self.settings.max_new_tokens or answer[-1] in self._end_ids
